"""Results of an examination: the self-report of each rank, and the measurements of each direction of a link."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

from stormtorch.telemetry.statistics import mean, median, percentile

# Arriving below this fraction of the rate at which it was sent, a train was limited by the network.
_KEPT_UP = 0.8


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """Self-report of one rank."""

    rank: int
    host: str
    address: str
    port: int
    tcp_port: int
    mtu: int
    """MTU of its interface."""
    asked_buffer: int
    receive_buffer: int
    """Receive buffer that the kernel granted, in bytes."""
    versions: Mapping[str, str]
    chosen_port: bool = False
    """Whether the user chose the port."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DirectedLink:
    """One direction between two ranks."""

    source: int
    target: int
    received: bool
    """Whether any datagram arrived."""
    tcp: bool
    """Whether the source could connect to the target by TCP."""
    lost: str
    """A digit for each datagram of a steady train: 1 is lost."""
    overflowed: int = 0
    """Datagrams of all tests that the kernel of the target dropped, because the socket's buffer was full."""
    overflowed_steady: int = 0
    """Datagrams of the steady train that the kernel of the target dropped for the same reason."""
    duplicates: int = 0
    reordered: int = 0
    round_trips_s: tuple[float, ...] = ()
    clock_ahead_s: float | None = None
    """Time by which the target's clock is ahead of the source's."""
    seen: str = ""
    """Address of the source as the target sees it."""
    path_bytes: int = 0
    """Path MTU: largest IP packet that arrives; 0 if unknown."""
    rate_bits: float = 0.0
    """Bits per second at which a back-to-back train arrived, Ethernet headers included; 0 if unknown."""
    sent_bits: float = 0.0
    """Bits per second at which it was sent."""

    @property
    def sent(self) -> int:
        """Datagrams of the steady train."""
        return len(self.lost)

    @property
    def loss(self) -> float:
        """Fraction of the steady train that the network lost, without drops at a full buffer of the target."""
        if not self.sent:
            return 0.0 if self.received else 1.0
        return max(self.lost.count("1") - self.overflowed_steady, 0) / self.sent

    @property
    def burst(self) -> float:
        """Mean length of a run of losses; 1 if nothing was lost."""
        runs = [len(list(run)) for digit, run in groupby(self.lost) if digit == "1"]
        return mean(runs) if runs else 1.0

    @property
    def round_trip_s(self) -> float | None:
        """Median round trip."""
        return median(self.round_trips_s) if self.round_trips_s else None

    @property
    def slow_round_trip_s(self) -> float | None:
        """99th percentile of the round trip."""
        return percentile(self.round_trips_s, 99) if self.round_trips_s else None

    @property
    def jitter_s(self) -> float | None:
        """Mean difference between a round trip and the one before."""
        steps = [abs(b - a) for a, b in zip(self.round_trips_s, self.round_trips_s[1:], strict=False)]
        return mean(steps) if steps else None

    @property
    def bottleneck_bits(self) -> float:
        """Rate corrected for random loss: a train with gaps takes as long as a whole one."""
        return self.rate_bits / (1.0 - min(self.loss, 0.9))

    @property
    def limited(self) -> bool:
        """Whether the network limited the rate; otherwise an end did, and the link may carry more."""
        return not self.overflowed and 0.0 < self.bottleneck_bits < _KEPT_UP * self.sent_bits

    def to_json(self) -> dict[str, Any]:
        """Measurements as plain data, with units in the names."""
        return {
            "from": self.source,
            "to": self.target,
            "udp": self.received,
            "tcp": self.tcp,
            "sent": self.sent,
            "loss": self.loss,
            "burst": self.burst,
            "overflowed": self.overflowed,
            "duplicates": self.duplicates,
            "reordered": self.reordered,
            "round_trip_s": self.round_trip_s,
            "round_trip_99_s": self.slow_round_trip_s,
            "jitter_s": self.jitter_s,
            "clock_ahead_s": self.clock_ahead_s,
            "rate_bits_per_s": self.bottleneck_bits or None,
            "rate_is_limit": self.limited,
            "path_mtu": self.path_bytes or None,
            "seen_as": self.seen or None,
        }


@dataclass(frozen=True, kw_only=True)
class Examination:
    """All measurements."""

    world: int
    ranks: Mapping[int, Rank]
    """Ranks that reported."""
    missing: Mapping[int, str] = field(default_factory=dict)
    """Ranks that did not report, or were lost, and why."""
    links: Mapping[tuple[int, int], DirectedLink] = field(default_factory=dict)
    seconds: float = 0.0

    def name(self, rank: int) -> str:
        """Name of a rank in texts: its host; with its number if several ranks share the host."""
        if rank not in self.ranks:
            return f"rank {rank}"
        host = self.ranks[rank].host
        return host if [each.host for each in self.ranks.values()].count(host) == 1 else f"rank {rank} ({host})"

    def short_name(self, rank: int) -> str:
        """Name of a rank in tables: its host, without the domain if that is unique; its number if several ranks share
        the host.
        """
        for form in (_without_domain, str):
            names = {each: form(about.host) for each, about in self.ranks.items()}
            if rank in names and list(names.values()).count(names[rank]) == 1:
                return names[rank]
        return f"rank {rank}"

    def to_json(self) -> dict[str, Any]:
        """Measurements as plain data."""
        return {
            "world": self.world,
            "seconds": round(self.seconds, 3),
            "ranks": [asdict(each) for _, each in sorted(self.ranks.items())],
            "missing": {str(rank): why for rank, why in self.missing.items()},
            "links": [each.to_json() for _, each in sorted(self.links.items())],
        }


def _without_domain(host: str) -> str:
    return host if host.replace(".", "").isdigit() else host.partition(".")[0]

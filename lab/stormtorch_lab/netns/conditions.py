"""Conditions of the lab's network: rate, loss, delay, jitter, queues, cuts, NAT; checked on construction.

Conditions(rate="400mbit", loss=0.1)
Conditions(rate="100mbit", loss=0.1, burst=8, delay="20ms", jitter="2ms", queue="64kb")
Conditions(rate="100mbit", loss=0.1, burst="5ms")
Conditions(loss=PerLink(links={(0, 1): Trace.from_file("links.jsonl", line=7)}))
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

from stormtorch.checks import BadCondition
from stormtorch.network.loss import (
    Bernoulli,
    GilbertElliott,
    LinkModel,
    PerLink,
    TimedBursts,
    Trace,
    has_timed_bursts,
    loss_in_bursts,
)
from stormtorch.network.units import parse_rate, parse_size, parse_time

MOST_HOSTS = 64
LEAST_RATE = 64e3
"""Lowest rate in bits per second: below it, one Ethernet frame takes longer than a fifth of a second."""
MOST_DELAY_S = 5.0
LEAST_QUEUE_BYTES = 2 * 1514
LEAST_MTU, MOST_MTU = 576, 1500
"""Range of an MTU: from the least that every IPv4 path carries to that of Ethernet."""
CONE, SYMMETRIC = NAT_KINDS = "cone", "symmetric"
"""Kinds of NAT: "cone" maps a host to the same port for all destinations, "symmetric" to another port for each."""
MOST_CABLE_MTU = 65535
"""Largest MTU of a cable; jumbo frames of Ethernet have 9000."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AccessLink:
    """Access link between one host and the switch, if it differs from the others; None takes the common value."""

    up_bits: float | None = None
    down_bits: float | None = None
    queue_bytes: int | None = None
    mtu: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """Conditions of the network between the lab's hosts. Text such as "400mbit" and "20ms" becomes a number."""

    rate: str | float | None = None
    """Rate of each host's access link, in each direction, including Ethernet headers; None is unlimited."""
    queue: str | int = 512 << 10
    """Bytes of the queue at each end of an access link; further packets are dropped and counted as overflow."""
    loss: float | LinkModel | PerLink = 0.0
    """Loss of packets between hosts: a probability, or a model of links from `stormtorch.network.loss`."""
    burst: float | str = 1.0
    """Mean length of a run of losses in packets, or a mean time such as "5ms", if `loss` is a probability."""
    delay: str | float = 0.0
    """One-way delay between hosts: a round trip takes twice as long."""
    jitter: str | float = 0.0
    """Largest additional delay, drawn for each packet; packets stay in order."""
    low_share: float | None = None
    """Share of each access link that low-priority packets keep while other packets could use all of it, in [0, 1): 0
    leaves them up to a hundredth. A packet has low priority if its DSCP is 1 (lower effort) or 8 (CS1). Low priority
    may use a link fully while it is otherwise idle. None treats all packets alike."""
    low_queue: str | int = 128 << 10
    """Bytes of the low-priority queue at each end of an access link; further packets are dropped."""
    seed: int = 0
    """Seed of loss and jitter: with the same seed, the same packets of a link are lost."""
    tcp: str | None = None
    """TCP congestion control of the hosts; None takes this machine's."""
    cut: frozenset[int] = frozenset()
    """Hosts that are cut off."""
    cut_links: frozenset[tuple[int, int]] = frozenset()
    """Links (source, target) that are cut, each in one direction."""
    mtu: int | None = None
    """Bytes of the largest IP packet that passes a host's access link; larger ones are dropped without an ICMP error,
    as in many tunnels. None is Ethernet's 1500."""
    delays: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """Delays of single links (source, target) in seconds, instead of `delay`."""
    lines: Mapping[int, AccessLink] = field(default_factory=dict)
    """Access links that differ from the others, by host."""
    nat: Mapping[int, str] = field(default_factory=dict)
    """Hosts behind their own NAT router: "cone" maps a host to one port for all destinations, "symmetric" to another
    port for each."""
    cable: int | None = None
    """MTU of a cable between two hosts, without a switch, limits or loss; None is a switch."""

    def __post_init__(self) -> None:
        fixed = {
            "rate": None if self.rate is None else checked_rate("rate", self.rate),
            "queue": checked_queue("queue", self.queue),
            "low_queue": checked_queue("low_queue", self.low_queue),
            "delay": checked_delay("delay", self.delay),
            "jitter": checked_delay("jitter", self.jitter),
            "cut": frozenset(self.cut),
            "cut_links": frozenset((source, target) for source, target in self.cut_links),
            "mtu": None if self.mtu is None else checked_mtu("mtu", self.mtu),
            "nat": checked_nat(self.nat),
        }
        for name, value in fixed.items():
            object.__setattr__(self, name, value)
        if not isinstance(self.loss, LinkModel | PerLink):
            object.__setattr__(self, "loss", link_model(self.loss, self.burst))
        elif self.burst != 1.0:
            raise BadCondition("burst", "needs a loss that is a number; a model has its own burst")
        if not 0 <= self.seed < 2**63:
            raise BadCondition("seed", f"must be an integer in [0, 2^63), got {self.seed!r}")
        if self.jitter and not self.delayed:
            raise BadCondition("jitter", "needs a delay to vary")
        if self.low_share is not None:
            self._check_low()
        if self.cable is not None:
            self._check_cable(self.cable)

    def _check_low(self) -> None:
        share = _finite("low_share", self.low_share)
        if not 0.0 <= share < 1.0:
            raise BadCondition("low_share", f"must lie in [0, 1), got {share:g}")
        if any(None in (line.up_bits, line.down_bits) for line in (self.line(-1), *map(self.line, self.lines))):
            raise BadCondition("low_share", "needs a rate: packets never queue on a link without a limit")
        if self.delayed or self.timed:
            raise BadCondition(
                "low_share", "needs the kernel's network, which has neither delays nor bursts in time: leave those out"
            )

    def _check_cable(self, mtu: object) -> None:
        if isinstance(mtu, bool) or not isinstance(mtu, int) or not LEAST_MTU <= mtu <= MOST_CABLE_MTU:
            raise BadCondition("cable", f"must be an MTU in [{LEAST_MTU}, {MOST_CABLE_MTU}] bytes, got {mtu!r}")
        wants = {
            "rate": self.rate is not None,
            "loss": self.loss != Bernoulli(p=0.0),
            "delay": self.delayed,
            "mtu": self.mtu is not None,
            "low_share": self.low_share is not None,
            "cut": bool(self.cut or self.cut_links),
            "per_link": bool(self.lines),
            "nat": bool(self.nat),
        }
        for name, wanted in wants.items():
            if wanted:
                raise BadCondition(name, "needs a switch, which a cable does not have: leave out one of them")

    @property
    def rate_bits(self) -> float | None:
        """Rate in bits per second."""
        assert not isinstance(self.rate, str)
        return self.rate

    @property
    def queue_bytes(self) -> int:
        """Queue in bytes."""
        assert not isinstance(self.queue, str)
        return self.queue

    @property
    def low_queue_bytes(self) -> int:
        """Queue of low priority in bytes."""
        assert not isinstance(self.low_queue, str)
        return self.low_queue

    @property
    def delay_s(self) -> float:
        """One-way delay in seconds."""
        assert not isinstance(self.delay, str)
        return self.delay

    @property
    def jitter_s(self) -> float:
        """Jitter in seconds."""
        assert not isinstance(self.jitter, str)
        return self.jitter

    @property
    def delayed(self) -> bool:
        """Whether any link has a delay."""
        return self.delay_s > 0 or any(self.delays.values())

    @property
    def timed(self) -> bool:
        """Whether any link has bursts by time instead of by packets."""
        assert isinstance(self.loss, LinkModel | PerLink)
        return has_timed_bursts(self.loss)

    def model(self, source: int, target: int) -> LinkModel:
        """Loss model of one link."""
        assert isinstance(self.loss, LinkModel | PerLink)
        return self.loss.model(source, target) if isinstance(self.loss, PerLink) else self.loss

    def link_delay_s(self, source: int, target: int) -> float:
        """One-way delay of one link in seconds."""
        return self.delays.get((source, target), self.delay_s)

    def line(self, host: int) -> AccessLink:
        """Access link of one host, with all values filled in."""
        own = self.lines.get(host, AccessLink())
        return AccessLink(
            up_bits=self.rate_bits if own.up_bits is None else own.up_bits,
            down_bits=self.rate_bits if own.down_bits is None else own.down_bits,
            queue_bytes=self.queue_bytes if own.queue_bytes is None else own.queue_bytes,
            mtu=self.mtu if own.mtu is None else own.mtu,
        )

    def unhindered(self) -> "Conditions":
        """Copies the conditions without loss, cuts and MTUs, to measure rates and round trips."""
        lines = {host: replace(line, mtu=None) for host, line in self.lines.items()}
        return self.changed(loss=0.0, cut=(), cut_links=(), mtu=None, lines=lines)

    def changed(self, **changes: Any) -> "Conditions":
        """Copies the conditions with some changes. A new loss has a burst of 1 unless `burst` is given, too."""
        known = {each.name for each in fields(self)}
        for name in changes:
            if name not in known:
                raise BadCondition(name, f"is not a condition; the conditions are {', '.join(sorted(known))}")
        if "burst" in changes and "loss" not in changes:
            raise BadCondition("burst", "needs a loss")
        if "loss" in changes:
            changes.setdefault("burst", 1.0)
        else:
            changes["burst"] = 1.0  # the burst is already part of the model
        return replace(self, **changes)

    def check(self, hosts: int) -> None:
        """Raises BadCondition if the conditions name a host that a lab of `hosts` hosts does not have."""
        links = set(self.delays) | (set(self.loss.links) if isinstance(self.loss, PerLink) else set())
        for source, target in links:
            for host in (source, target):
                if not 0 <= host < hosts:
                    raise BadCondition("per_link", f"names host {host}; the hosts are 0 to {hosts - 1}")
        if self.cable is not None and hosts != 2:
            raise BadCondition("cable", f"joins exactly two hosts, got {hosts}")
        for source, target in self.cut_links:
            if source == target:
                raise BadCondition("cut", f"names a link from host {source} to itself")
        ends = {host for link in self.cut_links for host in link}
        for name, named in (("cut", self.cut | ends), ("per_link", self.lines), ("nat", self.nat)):
            for host in named:
                if not 0 <= host < hosts:
                    raise BadCondition(name, f"names host {host}; the hosts are 0 to {hosts - 1}")

    def to_json(self) -> dict[str, Any]:
        """Conditions as plain data, with units in the names."""
        data: dict[str, Any] = {
            "rate_bits_per_s": self.rate_bits,
            "queue_bytes": self.queue_bytes,
            "loss": _model_json(self.loss),
            "delay_s": self.delay_s,
            "round_trip_s": 2 * self.delay_s,
            "jitter_s": self.jitter_s,
            "seed": self.seed,
            "tcp": self.tcp,
        }
        if self.low_share is not None:
            data |= {"low_share": self.low_share, "low_queue_bytes": self.low_queue_bytes}
        if self.cut:
            data["cut"] = sorted(self.cut)
        if self.cut_links:
            data["cut_links"] = [f"{source}>{target}" for source, target in sorted(self.cut_links)]
        if self.mtu is not None:
            data["mtu"] = self.mtu
        if self.cable is not None:
            data["cable_mtu"] = self.cable
        if self.nat:
            data["nat"] = dict(sorted(self.nat.items()))
        if self.delays:
            data["delays_s"] = {f"{source}>{target}": delay for (source, target), delay in self.delays.items()}
        if self.lines:
            data["lines"] = {
                host: {"up_bits": line.up_bits, "down_bits": line.down_bits, "queue_bytes": line.queue_bytes}
                | ({} if line.mtu is None else {"mtu": line.mtu})
                for host in self.lines
                for line in (self.line(host),)
            }
        return data


def checked_delay(name: str, value: object) -> float:
    """Parses a delay such as "20ms" or 0.02 into seconds, and checks its range."""
    with _as_condition(name):
        seconds = parse_time(value, name)
    if not 0.0 <= seconds <= MOST_DELAY_S:
        raise BadCondition(name, f"must lie in [0, {MOST_DELAY_S:g}] s, got {seconds:g} s")
    return seconds


def checked_queue(name: str, value: object) -> int:
    """Parses the size of a queue such as "512kb" or 524288 into bytes, and checks its range."""
    with _as_condition(name):
        size = parse_size(value, name)
    if not LEAST_QUEUE_BYTES <= size <= 1 << 30:
        raise BadCondition(name, f"must lie in [{LEAST_QUEUE_BYTES} b, 1024 mb], got {size:g} b")
    return round(size)


def checked_mtu(name: str, value: object) -> int:
    """Checks the range of an MTU in bytes, for IPv4 over Ethernet."""
    if isinstance(value, bool) or not isinstance(value, int) or not LEAST_MTU <= value <= MOST_MTU:
        raise BadCondition(name, f"must be a number of bytes in [{LEAST_MTU}, {MOST_MTU}], got {value!r}")
    return value


def checked_nat(nat: Mapping[int, str]) -> dict[int, str]:
    """Checks the kinds of NAT routers, by host."""
    for host, kind in nat.items():
        if kind not in NAT_KINDS:
            raise BadCondition("nat", f"must be {' or '.join(NAT_KINDS)} for each host, got {kind!r} for host {host}")
    return dict(nat)


def both_ways(*links: tuple[int, int]) -> frozenset[tuple[int, int]]:
    """Links in both directions, for `Conditions.cut_links`."""
    return frozenset(each for source, target in links for each in ((source, target), (target, source)))


def between(*sides: Iterable[int]) -> frozenset[tuple[int, int]]:
    """All links between the sides of a network partition, for `Conditions.cut_links`."""
    groups = [frozenset(side) for side in sides]
    return frozenset(
        (source, target)
        for side in groups
        for other in groups
        if other is not side
        for source in side
        for target in other
    )


def checked_rate(name: str, value: object) -> float:
    """Parses a rate such as "400mbit" into bits per second, and checks its range."""
    with _as_condition(name):
        bits = parse_rate(value, name)
    if not LEAST_RATE <= bits <= 400e9:
        raise BadCondition(name, f"must lie in [64 kbit/s, 400 Gbit/s], got {value!r}")
    return bits


@contextmanager
def _as_condition(name: str) -> Iterator[None]:
    """Turns a ValueError that begins with `name` into a BadCondition."""
    try:
        yield
    except ValueError as error:
        raise BadCondition(name, str(error).removeprefix(f"{name} ")) from error


def link_model(loss: object, burst: object) -> LinkModel:
    """Model of a link with this loss rate and burst length; raises BadCondition for the wrong one."""
    p, length = _finite("loss", loss), burst if isinstance(burst, str) else _finite("burst", burst)
    if not 0.0 <= p <= 1.0:
        percent = f"; {p:g} % is {p / 100:g}" if 1.0 < p <= 100.0 else ""
        raise BadCondition("loss", f"must lie in [0, 1], got {p:g}{percent}")
    with _as_condition("burst"):
        return loss_in_bursts(p, length, name="loss")


def _finite(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadCondition(name, f"must be a number, got {value!r}")
    return float(value)


def _model_json(model: Any) -> Any:
    if isinstance(model, PerLink):
        links = {f"{source}>{target}": _model_json(own) for (source, target), own in model.links.items()}
        return {"default": _model_json(model.default), "links": links}
    if isinstance(model, Trace):
        return {"trace": "".join("01"[bit] for bit in model.bits)}
    if isinstance(model, GilbertElliott):
        return {"p": model.p, "burst": model.burst}
    if isinstance(model, TimedBursts):
        return {"p": model.p, "burst_s": model.burst_s}
    assert isinstance(model, Bernoulli)
    return model.p

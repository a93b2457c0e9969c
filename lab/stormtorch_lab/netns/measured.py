"""Measurements of the lab's network: packet counters, and rates and round trips from a probe."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple


class LinkCount(NamedTuple):
    """Packets from one host to another."""

    source: int
    target: int
    seen: int
    lost: int
    """Packets that the lab dropped on purpose."""
    bursts: int | None = None
    """Runs of consecutive dropped packets; None if the network does not count them."""


class AccessLinkCount(NamedTuple):
    """Packets between one host and the switch."""

    host: int
    direction: str
    """"up" is from the host to the switch."""
    packets: int
    """Packets that passed."""
    overflowed: int
    """Packets that found the queue full: congestion loss, caused by the senders."""
    low_packets: int | None = None
    """Packets of low priority that passed, of all `packets`; None where the network treats all packets alike."""
    low_overflowed: int | None = None
    """Packets of low priority that found their queue full, of all `overflowed`; None as for `low_packets`."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Counters since the last `reset`, and the probe's measurements from when the lab opened."""

    links: list[LinkCount]
    lines: list[AccessLinkCount]
    rates_bits: list[float] = field(default_factory=list)
    """Rate at which each host received in the probe's best tenth of a second; empty if the lab has no rate."""
    round_trips_s: list[float] = field(default_factory=list)
    """Round trips from each host to the next one, measured by the probe."""

    @property
    def loss(self) -> float:
        """Fraction of all packets that the lab dropped on purpose."""
        seen = sum(link.seen for link in self.links)
        return sum(link.lost for link in self.links) / seen if seen else 0.0

    @property
    def burst(self) -> float | None:
        """Mean length of a run of dropped packets; None if nothing was lost or the network does not count runs."""
        bursts = sum(link.bursts or 0 for link in self.links)
        return sum(link.lost for link in self.links) / bursts if bursts else None

    @property
    def overflow(self) -> float:
        """Fraction of all packets that found a queue full."""
        lost = sum(line.overflowed for line in self.lines)
        # Each packet passes two access links; it is counted on the sender's.
        sent = sum(line.packets + line.overflowed for line in self.lines if line.direction == "up")
        return lost / sent if sent else 0.0

    @property
    def low_loss(self) -> float | None:
        """Fraction of the low-priority packets that found their queue full; None if there were none."""
        lost = sum(line.low_overflowed or 0 for line in self.lines)
        sent = sum(
            (line.low_packets or 0) + (line.low_overflowed or 0) for line in self.lines if line.direction == "up"
        )
        return lost / sent if sent else None

    def since(self, before: "Measured") -> "Measured":
        """Counters since `before`."""
        links = {(link.source, link.target): link for link in before.links}
        lines = {(line.host, line.direction): line for line in before.lines}
        return Measured(
            links=[_less_link_count(link, links.get((link.source, link.target))) for link in self.links],
            lines=[_less_access_link(line, lines.get((line.host, line.direction))) for line in self.lines],
            rates_bits=self.rates_bits,
            round_trips_s=self.round_trips_s,
        )

    def to_json(self) -> dict[str, Any]:
        """Measurements as plain data, with units in the names."""
        return {
            "loss": self.loss,
            **({} if self.burst is None else {"burst": self.burst}),
            "overflow": self.overflow,
            **({} if self.low_loss is None else {"low_loss": self.low_loss}),
            "rates_bits_per_s": [round(rate) for rate in self.rates_bits],
            "round_trips_s": [round(seconds, 6) for seconds in self.round_trips_s],
            "links": [link._asdict() for link in self.links],
            "lines": [line._asdict() for line in self.lines],
        }


def _less_link_count(now: LinkCount, before: LinkCount | None) -> LinkCount:
    if before is None:
        return now
    bursts = None if now.bursts is None else now.bursts - (before.bursts or 0)
    return now._replace(seen=now.seen - before.seen, lost=now.lost - before.lost, bursts=bursts)


def _less_access_link(now: AccessLinkCount, before: AccessLinkCount | None) -> AccessLinkCount:
    if before is None:
        return now
    return now._replace(
        packets=now.packets - before.packets,
        overflowed=now.overflowed - before.overflowed,
        low_packets=None if now.low_packets is None else now.low_packets - (before.low_packets or 0),
        low_overflowed=None if now.low_overflowed is None else now.low_overflowed - (before.low_overflowed or 0),
    )

"""What the lab's network really did, as its own counters and a probe saw it."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple


class LinkCount(NamedTuple):
    """Packets from one host to another."""

    source: int
    target: int
    seen: int
    lost: int
    """On purpose."""


class LineCount(NamedTuple):
    """Packets between one host and the switch."""

    host: int
    direction: str
    """"up" is from the host to the switch."""
    packets: int
    """That passed."""
    overflowed: int
    """That found the queue full: what senders inflict on themselves."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Counters since the last `reset`, and what the probe found before anything ran."""

    links: list[LinkCount]
    lines: list[LineCount]
    rates_bits: list[float] = field(default_factory=list)
    """What each host received in the probe's best tenth of a second; empty where no rate was asked for."""
    round_trips_s: list[float] = field(default_factory=list)
    """From each host to the next one and back, by the probe."""

    @property
    def loss(self) -> float:
        """Fraction lost on purpose, over all links."""
        seen = sum(link.seen for link in self.links)
        return sum(link.lost for link in self.links) / seen if seen else 0.0

    @property
    def overflow(self) -> float:
        """Fraction of all packets that found a queue full."""
        lost = sum(line.overflowed for line in self.lines)
        # Each packet passes two lines; its sender's is where it is counted.
        sent = sum(line.packets + line.overflowed for line in self.lines if line.direction == "up")
        return lost / sent if sent else 0.0

    def since(self, before: "Measured") -> "Measured":
        """What was counted after `before`."""
        links = {(link.source, link.target): link for link in before.links}
        lines = {(line.host, line.direction): line for line in before.lines}
        return Measured(
            links=[_less_link(link, links.get((link.source, link.target))) for link in self.links],
            lines=[_less_line(line, lines.get((line.host, line.direction))) for line in self.lines],
            rates_bits=self.rates_bits,
            round_trips_s=self.round_trips_s,
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data, with units in the names."""
        return {
            "loss": self.loss,
            "overflow": self.overflow,
            "rates_bits_per_s": [round(rate) for rate in self.rates_bits],
            "round_trips_s": [round(seconds, 6) for seconds in self.round_trips_s],
            "links": [link._asdict() for link in self.links],
            "lines": [line._asdict() for line in self.lines],
        }


def _less_link(now: LinkCount, before: LinkCount | None) -> LinkCount:
    return now if before is None else now._replace(seen=now.seen - before.seen, lost=now.lost - before.lost)


def _less_line(now: LineCount, before: LineCount | None) -> LineCount:
    if before is None:
        return now
    return now._replace(packets=now.packets - before.packets, overflowed=now.overflowed - before.overflowed)

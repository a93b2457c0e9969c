"""Measurements: samples of single calls, counters of the engine, and logs of a rank or a whole job."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from typing import NamedTuple

from stormtorch.exchange.exchange import ExchangeResult
from stormtorch.udp.udp import UdpTransport


class Delivery(NamedTuple):
    """Outcome of a call."""

    arrived: float = 1.0
    """Fraction of the chunks that arrived."""
    repaired: int = 0
    """Chunks sent again."""

    @classmethod
    def of(cls, arrivals: Sequence[ExchangeResult]) -> "Delivery":
        """Combines all exchanges of a call: mean of the arrived fraction, sum of the retransmissions."""
        if not arrivals:
            return cls()
        arrived = sum(arrival.arrived for arrival in arrivals) / len(arrivals)
        return cls(arrived, sum(arrival.repaired for arrival in arrivals))


class Sample(NamedTuple):
    """One call, on one rank or, merged, on all."""

    backend: str
    bytes: int
    round: int
    seconds: float
    cpu_s: float
    """CPU time of the process, engine threads included, until all ranks were done."""
    arrived: float
    """Fraction of the chunks that arrived."""
    repaired: int
    """Chunks sent again."""
    gave_up: bool = False
    """Whether the call did not end; `seconds` is then how long it was waited for."""


@dataclass(frozen=True)
class Counters:
    """Counters of datagrams, from the engine."""

    lost: int = 0
    """Datagrams lost by fault injection."""
    seen: int = 0
    """Datagrams to which fault injection applied."""
    kernel_drops: int = 0
    """Datagrams that the kernel dropped because a socket's buffer was full."""
    sent_bytes: int = 0
    """Bytes sent by datagram or through shared memory, with the engine's headers but without those of UDP."""
    datagram_bytes: int = 0
    """Bytes of all datagrams sent, counted the same way: without shared memory."""
    copied_bytes: int = 0
    """Bytes copied into shared memory, once for all readers, and bytes read from it."""

    @classmethod
    def of(cls, transport: UdpTransport) -> "Counters":
        """Reads the counters of the engine."""
        health = transport.health()
        faults = health["faults"]
        return cls(
            lost=faults["lost"],
            seen=faults["seen"],
            kernel_drops=health["overflow"],
            sent_bytes=health["bytes_sent"] + health["shared_bytes_sent"],
            datagram_bytes=health["bytes_sent"],
            copied_bytes=health["shared_bytes_sent"] - health["shelved_bytes_sent"] + health["shared_bytes_received"],
        )

    def __add__(self, other: "Counters") -> "Counters":
        return Counters(*(own + theirs for own, theirs in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: "Counters") -> "Counters":
        return Counters(*(own - theirs for own, theirs in zip(astuple(self), astuple(other), strict=True)))

    @property
    def loss(self) -> float:
        """Fraction that fault injection dropped; 0 without datagrams."""
        return self.lost / self.seen if self.seen else 0.0


@dataclass(frozen=True)
class Log:
    """Measurements of one rank, or of all of them together."""

    samples: list[Sample]
    """Samples in the order of the calls."""
    counters: dict[tuple[str, int], Counters] = field(default_factory=dict)
    """Counters of each storm backend and size, over its timed rounds."""
    chunk_bytes: int | None = None
    tcp: dict[str, str] = field(default_factory=dict)
    """Congestion control of the connections of each backend over TCP."""


def merge(logs: Sequence[Log]) -> Log:
    """Merges logs of ranks: the slowest rank's time, sums of CPU time and repairs, the mean arrived fraction."""
    samples: list[Sample] = []
    for calls in zip(*(log.samples for log in logs), strict=True):
        first = calls[0]
        if any(call[:3] != first[:3] for call in calls):
            raise RuntimeError(f"ranks disagree on the order of calls: {sorted({call[:3] for call in calls})}")
        samples.append(
            first._replace(
                seconds=max(call.seconds for call in calls),
                cpu_s=sum(call.cpu_s for call in calls),
                arrived=sum(call.arrived for call in calls) / len(calls),
                repaired=sum(call.repaired for call in calls),
            )
        )
    counters = {key: sum((log.counters[key] for log in logs), Counters()) for key in logs[0].counters}
    return Log(samples, counters, logs[0].chunk_bytes, logs[0].tcp)

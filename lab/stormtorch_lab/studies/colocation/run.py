"""One simulated run of a training beside a service: the engine's core, links with traffic classes, a model of TCP."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

import stormtorch._engine as _engine
from stormtorch.checks import BadSetting, check, check_between
from stormtorch.collectives.base.spans import shards
from stormtorch.exchange.exchange import Plan, Receive, ReduceMode, Reduction, Send, WireDtype
from stormtorch.exchange.options import Options
from stormtorch.exchange.reliability import Reliability
from stormtorch.exchange.simulated import core_settings
from stormtorch.network.faults import faults
from stormtorch.network.units import parse_rate
from stormtorch.telemetry.statistics import mean, percentile
from stormtorch_lab._engine import SharedNetwork

# Headers of a datagram on the wire: Ethernet, IPv4, UDP.
_HEADER_BYTES = 42
# The engine counts nanoseconds.
_TICK_S = 1e-9
# Interval at which ranks check whether their exchange has ended.
_POLL_S = 0.5e-3
# Wait limit for replies to requests that arrived before the end.
_REPLY_WAIT_LIMIT_S = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Colocation:
    """Settings of a training and a service on hosts at one switch, with shared access links."""

    hosts: int = 16
    """Number of hosts. Each is a rank of the training, and a client and server of the service."""
    rate: str | float = "1gbit"
    """Rate of each host's access link, in each direction, including Ethernet headers."""
    queue_bytes: int = 512 << 10
    """Bytes of the switch's queue for each host; further packets are dropped."""
    up_queue_bytes: int = 0
    """Bytes of each host's send queue; 0 is unlimited, as a kernel limits its own sockets."""
    delay_s: float = 50e-6
    """One-way delay between hosts."""
    burst_s: float = 0.0
    """Burst of an idle link, as a time at its rate: 0 for a wire; Linux's shapers in the lab have 1 ms."""
    low_share: float | None = None
    """Share of each link that the training keeps while the service could use all of it, in [0, 1). None has no traffic
    classes: all packets share one queue."""
    low_queue_bytes: int = 512 << 10
    """Bytes of the low-priority queue at each end of a link."""
    training: str | float = 150e6
    """Mean payload that each rank of the training sends, in bits per second; 0 is no training."""
    every_s: float = 0.2
    """Time from the start of one exchange to the start of the next."""
    sending: str | float = "auto"
    """Sending rate of the training, as `Options.rate`: "auto" bursts at the rate of the link, "low" also yields, and a
    rate such as "200mbit" spreads each exchange."""
    slack: float | None = 2.0
    """Deadline of each stage of an exchange, as a multiple of its time without the service; None waits for all chunks
    that were not lost."""
    requests_per_s: float = 5000.0
    """Requests per second of all hosts together, as a Poisson process; 0 is no service."""
    response_bytes: int = 100_000
    """Bytes of each response."""
    request_bytes: int = 128
    """Bytes of each request."""
    host_s: float = 0.0
    """Time that server and client compute for each request, in addition to the network."""
    seconds: float = 2.0
    """Measured time."""
    warm_s: float = 0.4
    """Time before that, in which connections open and the rates converge."""
    seed: int = 0
    """Seed of the requests."""

    def __post_init__(self) -> None:
        check_between("hosts", self.hosts, 2, 1024)
        object.__setattr__(self, "rate", parse_rate(self.rate))
        if self.training:
            object.__setattr__(self, "training", parse_rate(self.training, "training"))
        if self.low_share is not None:
            check(0.0 <= self.low_share < 1.0, "low_share", "lie in [0, 1) or be None", self.low_share)
        check(self.slack is None or self.slack > 0.0, "slack", "be above 0 or None", self.slack)
        check_between("requests_per_s", self.requests_per_s, 0.0, 1e7)
        check_between("response_bytes", self.response_bytes, 1, 1 << 30)
        check_between("request_bytes", self.request_bytes, 1, 1448)
        for name in ("every_s", "seconds"):
            check(getattr(self, name) > 0.0, name, "be above 0", getattr(self, name))
        for name in (
            "queue_bytes",
            "up_queue_bytes",
            "low_queue_bytes",
            "delay_s",
            "burst_s",
            "host_s",
            "warm_s",
            "seed",
        ):
            check(getattr(self, name) >= 0, name, "not be negative", getattr(self, name))
        if not self.training and not self.requests_per_s:
            raise BadSetting("training", "and requests_per_s must not both be 0")
        self.options  # noqa: B018  (rejects invalid rates)

    @property
    def options(self) -> Options:
        """Options of the training's transports."""
        return Options(rate=self.sending, datagram_bytes=1472)

    @property
    def elements(self) -> int:
        """Number of float32 values in an exchange, from the rate `training`."""
        sent = float(self.training) / 8 * self.every_s  # by each rank, in both stages
        return round(sent * self.hosts / (2 * (self.hosts - 1)) / 4)

    @property
    def alone_s(self) -> float:
        """Time of one stage on idle links."""
        payload = _engine.chunk_bytes(1472, False)
        wire_bytes = self.elements * 4 * (self.hosts - 1) / self.hosts * (1472 + _HEADER_BYTES) / payload
        pace = self.sending if self.sending not in ("auto", "low", "unlimited") else self.rate
        return wire_bytes * 8 / min(parse_rate(pace), float(self.rate)) + 2 * self.delay_s

    @property
    def deadline_s(self) -> float | None:
        """Deadline of each stage."""
        return None if self.slack is None else self.slack * self.alone_s

    @property
    def lines(self) -> dict[str, Any]:
        """Access links shared by training and service, in the form that the engine expects."""
        return {
            "bytes_per_s": float(self.rate) / 8,
            "queue_bytes": self.queue_bytes,
            "up_queue_bytes": self.up_queue_bytes,
            "low_queue_bytes": self.low_queue_bytes,
            "low_share": self.low_share or 0.0,
            "burst_bytes": self.burst_s * float(self.rate) / 8,
            "low": self.low_share is not None,
            "hosts_per_rack": 0,
            "trunk_bytes_per_s": 0.0,
            "trunk_queue_bytes": 0,
        }

    @staticmethod
    def of_the_lab(**others: Any) -> Colocation:
        """Settings of the lab's network: 8 hosts at 100 Mbit/s, with the bursts of Linux's shapers.

        The time of nginx and the client is calibrated on two cores at 100 requests/s without a training. So only other
        rates, and runs beside a training, test whether lab and model agree.
        """
        lab: dict[str, Any] = {
            "hosts": 8,
            "rate": "100mbit",
            "burst_s": 1e-3,
            "low_queue_bytes": 128 << 10,
            "training": 15e6,
            "every_s": 1.0,
            "requests_per_s": 250.0,
            "host_s": 2.3e-3,
            "seconds": 6.0,
            "warm_s": 2.0,
        }
        return Colocation(**{**lab, **others})


@dataclass(frozen=True, kw_only=True, slots=True)
class Colocated:
    """Measured values of one run."""

    mean_s: float | None
    """Mean time from a request's arrival to the last byte of its response; None without a service. Requests without
    a response count as three seconds."""
    p50_s: float | None
    """Median over the requests with a response."""
    p99_s: float | None
    """99th percentile over the requests with a response."""
    requests: int
    """Requests that arrived in the measured time and got a response."""
    unanswered: int
    """Requests that arrived in the measured time without a response within three seconds after it."""
    resent: int
    """Retransmitted segments of TCP."""
    timeouts: int
    """Retransmission timeouts of TCP."""
    loss: float | None
    """Fraction of the training's bytes that did not arrive in time; None without a training."""
    stage_loss: tuple[float, float] | None
    """Fraction of the bytes of each stage, up and down, that did not arrive in time; None without a training."""
    exchanges: int
    """Exchanges measured, counted at each rank."""
    exchange_s: float | None
    """Mean time of an exchange."""
    drops: int
    """Packets of normal priority that found a full queue."""
    low_drops: int
    """Packets of low priority that found a full queue."""

    def to_json(self) -> dict[str, Any]:
        """Plain values, by name."""
        return asdict(self)


def colocate(settings: Colocation) -> Colocated:
    """Runs a training beside a service, in virtual time."""
    network = SharedNetwork(settings.hosts, settings.lines, settings.delay_s)
    sim = _engine.Sim(
        settings.hosts,
        core_settings(settings.hosts, settings.options, unlimited=False, seed=settings.seed),
        dict(faults(loss=0.0, seed=settings.seed).settings),
        settings.delay_s,
        0.0,
        0,
        network,
    )
    begin_s = sim.now_s + settings.warm_s
    end_s = begin_s + settings.seconds
    training = SimulatedTraining(sim, settings) if settings.training else None
    if settings.requests_per_s:
        network.serve(
            settings.requests_per_s, settings.response_bytes, settings.request_bytes, settings.seed, sim.now_s
        )
    _run_until(sim, training, begin_s, measured=False)
    before = _counts(network, settings)
    _run_until(sim, training, end_s, measured=True)
    if settings.requests_per_s:
        network.stop_service()
        # The training goes on, so that the last requests do not find idle links.
        drain_until_s = end_s + _REPLY_WAIT_LIMIT_S
        while network.service_counts()["answered"] < network.service_counts()["asked"] and sim.now_s < drain_until_s:
            _run_until(sim, training, sim.now_s + _POLL_S, measured=False)
    counts = {name: value - before[name] for name, value in _counts(network, settings).items()}
    answered = network.answered() if settings.requests_per_s else []
    times = [took + settings.host_s for at, took in answered if at >= begin_s]
    unanswered = counts["asked"] - len(times)
    return Colocated(
        mean_s=mean(times + [_REPLY_WAIT_LIMIT_S] * unanswered) if times else None,
        p50_s=percentile(times, 50) if times else None,
        p99_s=percentile(times, 99) if times else None,
        requests=len(times),
        unanswered=unanswered,
        resent=counts["resent"],
        timeouts=counts["timeouts"],
        loss=training.loss if training else None,
        stage_loss=training.stage_loss if training else None,
        exchanges=len(training.took_s) if training else 0,
        exchange_s=mean(training.took_s) if training and training.took_s else None,
        drops=counts["drops"],
        low_drops=counts["low_drops"],
    )


def _run_until(sim: _engine.Sim, training: SimulatedTraining | None, at_s: float, *, measured: bool) -> None:
    while sim.now_s < at_s - _TICK_S:
        if training is not None:
            training.go_on(measured=measured)
        sim.run_until(at_s if training is None else min(sim.now_s + _POLL_S, at_s))


def _counts(network: SharedNetwork, settings: Colocation) -> dict[str, int]:
    """Counters since the network was made."""
    lines = [network.access_link_counts(host) for host in range(settings.hosts)]
    service = network.service_counts() if settings.requests_per_s else {"asked": 0, "resent": 0, "timeouts": 0}
    return {
        "asked": service["asked"],
        "resent": service["resent"],
        "timeouts": service["timeouts"],
        "drops": sum(line[way]["drops"] for line in lines for way in ("up", "down")),
        "low_drops": sum(line[way]["drops"] for line in lines for way in ("up_low", "down_low")),
    }


class SimulatedTraining:
    """The exchanges of a training at a fixed pace: owners collect contributions and broadcast the results.

    Args:
        sim: Network with a core for every rank.
        settings: Settings of the run.
    """

    def __init__(self, sim: _engine.Sim, settings: Colocation) -> None:
        self.hosts = settings.hosts
        self.took_s: list[float] = []
        self._sim, self._settings = sim, settings
        self._memory = [torch.zeros(settings.elements) for _ in range(settings.hosts)]
        self._start_s = sim.now_s
        self._begun = [0] * settings.hosts
        self._running: list[tuple[int, bool] | None] = [None] * settings.hosts  # id, and whether it is measured
        self._bytes, self._missing = [0, 0], [0, 0]  # by stage

    @property
    def loss(self) -> float | None:
        """Fraction of all bytes that did not arrive in time."""
        return sum(self._missing) / sum(self._bytes) if sum(self._bytes) else None

    @property
    def stage_loss(self) -> tuple[float, float] | None:
        """Fraction of the bytes of each stage that did not arrive in time; None without a training."""
        if not all(self._bytes):
            return None
        return self._missing[0] / self._bytes[0], self._missing[1] / self._bytes[1]

    def go_on(self, *, measured: bool) -> None:
        """Collects finished exchanges and begins those that are due.

        Args:
            measured: Whether exchanges that begin now are measured.
        """
        for rank in range(self.hosts):
            for _, outcome in self._sim.take_finished(rank):
                self._end(rank, outcome)
            due_s = self._start_s + self._begun[rank] * self._settings.every_s
            if self._running[rank] is None and self._sim.now_s >= due_s - _TICK_S:
                self._running[rank] = self._sim.post(rank, *self._plan(rank).arguments()), measured
                self._begun[rank] += 1

    def _end(self, rank: int, outcome: _engine.Outcome) -> None:
        running, self._running[rank] = self._running[rank], None
        if outcome.status != _engine.Status.OK:
            raise RuntimeError(f"rank {rank}: the exchange ended with {outcome.status}")
        if running is None or not running[1]:
            return
        self.took_s.append(outcome.elapsed_s)
        for arrival in outcome.arrivals:
            self._bytes[arrival.second_stage] += arrival.total_bytes
            self._missing[arrival.second_stage] += arrival.missing_bytes

    def _plan(self, rank: int) -> Plan:
        flat = self._memory[rank]
        spans = [(flat.data_ptr() + 4 * first, 4 * count) for first, count in shards(flat.numel(), 4, self.hosts)]
        own, length = spans[rank]
        others = [(rank + step) % self.hosts for step in range(1, self.hosts)]
        reliability = Reliability(budget=1.0, deadline_s=self._settings.deadline_s)
        return Plan(
            "exchange",
            0,
            self._begun[rank],
            [Send(peer, *spans[peer]) for peer in others] + [Send(peer, own, length, True) for peer in others],
            [Receive(peer, 0, length, False, True) for peer in sorted(others)]
            + [Receive(peer, *spans[peer], True) for peer in others],
            Reduction(ReduceMode.ARRIVED, WireDtype.FLOAT32, WireDtype.FLOAT32, own, own, length, rank, True),
            reliability,
            reliability,
        )

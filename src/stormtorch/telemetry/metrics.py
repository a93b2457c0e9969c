"""Metrics of ranks for Prometheus, from their records: names, units and help texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from stormtorch.telemetry.records import Record

Samples = Iterable[tuple[dict[str, str], float]]
"""Values of a metric, each with its labels other than `rank`."""

_REJECTED = ("malformed", "foreign", "corrupt", "unexpected")
_SUMS = (
    "steps",
    "seconds",
    "gradient_wait_s",
    "broadcast_wait_s",
    "view_wait_s",
    "fetched",
    "guarded",
)


@dataclass(slots=True)
class RankMetrics:
    """Records of one process, reduced for metrics: the latest of each kind, and sums over all."""

    latest: dict[str, Record] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_SUMS, 0.0))
    events: int = 0
    time: float = 0.0

    def take(self, record: Record) -> None:
        """Adds a record as `records.parse` returns it."""
        kind = record["kind"]
        self.latest[kind] = record
        self.time = max(self.time, record["time"])
        if kind == "steps":
            for name in _SUMS:
                self.sums[name] += record.get(name) or 0.0
        self.events += kind == "event"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of every rank."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    read: Callable[[RankMetrics], Samples]


def _one(value: float | None) -> Samples:
    return () if value is None else (({}, float(value)),)


def _sum(name: str) -> Callable[[RankMetrics], Samples]:
    return lambda rank: _one(rank.sums[name])


def _last(kind: str, name: str) -> Callable[[RankMetrics], Samples]:
    return lambda rank: _one(rank.latest.get(kind, {}).get(name))


def _health(name: str) -> Callable[[RankMetrics], Samples]:
    # Records omit counters that are 0.
    return lambda rank: _one(rank.latest["links"].get("health", {}).get(name, 0)) if "links" in rank.latest else ()


def _link(name: str) -> Callable[[RankMetrics], Samples]:
    def read(rank: RankMetrics) -> Iterator[tuple[dict[str, str], float]]:
        for peer, link in rank.latest.get("links", {}).get("links", {}).items():
            if name in link:
                yield {"peer": peer}, float(link[name])

    return read


def _waits(rank: RankMetrics) -> Samples:
    stages = (("gradients", "gradient_wait_s"), ("broadcast", "broadcast_wait_s"), ("views", "view_wait_s"))
    return [({"stage": stage}, rank.sums[name]) for stage, name in stages]


def _arrived_by_link(rank: RankMetrics) -> Iterator[tuple[dict[str, str], float]]:
    for stage in ("gradients", "broadcast"):
        for peer, fraction in rank.latest.get("steps", {}).get(stage, {}).items():
            yield {"peer": peer, "stage": stage}, float(fraction)


def _drift(rank: RankMetrics) -> Iterator[tuple[dict[str, str], float]]:
    for between in ("pair", "owner"):
        value = rank.latest.get("steps", {}).get(f"{between}_drift")
        if value is not None:
            yield {"between": between}, float(value)


def _rejected(rank: RankMetrics) -> Samples:
    if "links" not in rank.latest:
        return ()
    health = rank.latest["links"].get("health", {})
    return [({"why": why}, float(health.get(why, 0))) for why in _REJECTED]


def _info(rank: RankMetrics) -> Samples:
    own = rank.latest.get("rank")
    if own is None:
        return ()
    # Not "job": Prometheus has a label of that name.
    names = ("group", "host", "policy", "stormtorch", "torch", "world", "incarnation")
    return (({name: str(own.get(name, "")) for name in names}, 1.0),)


def _lag(rank: RankMetrics) -> Samples:
    lag: Mapping[str, int] = rank.latest.get("steps", {}).get("lag", {})
    return _one(max(map(int, lag))) if lag else ()


def _members(rank: RankMetrics) -> Samples:
    return _one(len(rank.latest["view"]["members"])) if "view" in rank.latest else ()


def _waiting(rank: RankMetrics) -> Samples:
    if "links" not in rank.latest:
        return ()
    waits = rank.latest["links"].get("waits")
    return _one(0.0 if waits is None else waits.get("seconds"))


METRICS = (
    Metric("stormtorch_info", "gauge", "Always 1; the labels describe the rank.", _info),
    Metric(
        "stormtorch_last_record_timestamp_seconds", "gauge", "Time of the rank's last record.", lambda r: _one(r.time)
    ),
    Metric(
        "stormtorch_ended", "gauge", "1 if the process has written its end record.", lambda r: _one("end" in r.latest)
    ),
    Metric("stormtorch_steps_total", "counter", "Optimizer steps that this process has completed.", _sum("steps")),
    Metric("stormtorch_step", "gauge", "Number of the last complete step, from 0.", _last("steps", "step")),
    Metric("stormtorch_step_seconds_total", "counter", "Wall time of these steps.", _sum("seconds")),
    Metric("stormtorch_wait_seconds_total", "counter", "Time spent only waiting for other ranks.", _waits),
    Metric("stormtorch_waiting_seconds", "gauge", "Duration of the current wait; 0 for none.", _waiting),
    Metric(
        "stormtorch_train_loss",
        "gauge",
        "Training loss that the program reported by session.note().",
        _last("steps", "train_loss"),
    ),
    Metric("stormtorch_arrived_ratio", "gauge", "Fraction of the chunks that arrived.", _last("steps", "arrived")),
    Metric("stormtorch_link_arrived_ratio", "gauge", "Fraction of a peer's chunks that arrived.", _arrived_by_link),
    Metric(
        "stormtorch_broadcast_loss_ratio",
        "gauge",
        "Fraction of this rank's broadcast that its receivers lost.",
        _last("steps", "loss"),
    ),
    Metric("stormtorch_drift_mean_square", "gauge", "Mean squared difference between replicas.", _drift),
    Metric(
        "stormtorch_drift_bound_mean_square",
        "gauge",
        "Bound on the mean drift between two replicas.",
        _last("steps", "pair_bound"),
    ),
    Metric(
        "stormtorch_effective_batch_ratio",
        "gauge",
        "Fraction of the ranks whose gradients are in the mean.",
        _last("steps", "effective_batch"),
    ),
    Metric(
        "stormtorch_variance_inflation_ratio",
        "gauge",
        "Factor by which loss raises the variance of gradients.",
        _last("steps", "variance_inflation"),
    ),
    Metric("stormtorch_lag_steps", "gauge", "Age of the oldest copy of a parameter.", _lag),
    Metric(
        "stormtorch_fetched_chunks_total",
        "counter",
        "Chunks fetched exactly because their copy became too old.",
        _sum("fetched"),
    ),
    Metric("stormtorch_guarded_steps_total", "counter", "Steps that the guard made exact.", _sum("guarded")),
    Metric("stormtorch_events_total", "counter", "Events in the ledger.", lambda r: _one(r.events)),
    Metric("stormtorch_view_number", "gauge", "Number of the view.", _last("view", "number")),
    Metric("stormtorch_view_members", "gauge", "Members of the view.", _members),
    Metric("stormtorch_quorum", "gauge", "1 if the rank reaches a majority of the ranks.", _last("links", "quorum")),
    Metric(
        "stormtorch_link_loss_ratio",
        "gauge",
        "Recent fraction of lost datagrams from a peer.",
        _link("loss"),
    ),
    Metric("stormtorch_link_round_trip_seconds", "gauge", "Round-trip time to a peer.", _link("rtt_s")),
    Metric(
        "stormtorch_link_send_bytes_per_second",
        "gauge",
        "Rate at which the rank sends to a peer; 0 without a limit.",
        _link("rate"),
    ),
    Metric(
        "stormtorch_link_path_bytes", "gauge", "Largest datagram that the path to a peer carries.", _link("path_bytes")
    ),
    Metric("stormtorch_link_heard_seconds", "gauge", "Time since the last datagram from a peer.", _link("heard_s")),
    Metric("stormtorch_sent_bytes_total", "counter", "Bytes of all datagrams sent.", _health("bytes_sent")),
    Metric("stormtorch_received_bytes_total", "counter", "Bytes of all datagrams received.", _health("bytes_received")),
    Metric("stormtorch_sent_datagrams_total", "counter", "Datagrams sent.", _health("datagrams_sent")),
    Metric("stormtorch_received_datagrams_total", "counter", "Datagrams received.", _health("datagrams_received")),
    Metric("stormtorch_rejected_datagrams_total", "counter", "Invalid datagrams that were dropped.", _rejected),
    Metric("stormtorch_repaired_chunks_total", "counter", "Retransmitted chunks.", _health("repaired")),
    Metric("stormtorch_parity_bytes_total", "counter", "Bytes of parity sent.", _health("parity_bytes")),
    Metric("stormtorch_recovered_chunks_total", "counter", "Lost chunks decoded from parity.", _health("recovered")),
    Metric(
        "stormtorch_late_chunks_total",
        "counter",
        "Chunks that arrived after the end of their exchange.",
        _health("late"),
    ),
    Metric(
        "stormtorch_overflowed_datagrams_total",
        "counter",
        "Datagrams dropped because the socket's receive buffer was full.",
        _health("overflow"),
    ),
    Metric("stormtorch_pool_bytes", "gauge", "Memory in use for chunks that arrived early.", _health("pool_bytes")),
    Metric(
        "stormtorch_pool_refused_total",
        "counter",
        "Early chunks dropped because the pool was full.",
        _health("pool_refused"),
    ),
    Metric("stormtorch_cpu_seconds_total", "counter", "Processor time of the process.", _last("links", "cpu_s")),
)
"""All metrics. Each sample has a label `rank` beside its own."""

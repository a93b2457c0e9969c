"""Results of all-reduce benchmarks: per backend, and the report of all."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

from stormtorch.telemetry.json_files import write_json
from stormtorch.telemetry.statistics import median, percentile
from stormtorch_lab.bench.backends import Copies
from stormtorch_lab.jobs.counters import Log, Sample

CPU = (
    "user and system time of all threads of all ranks, from the end of the barrier until all ranks are done, per "
    "10^9 bytes of the tensor, which counts once. Packet processing by the kernel counts if it runs in a rank's "
    "time, not in the kernel's own threads (ksoftirqd)"
)
"""Definition of `cpu_s_per_gb`, for the conditions of every report."""


@dataclass(frozen=True, kw_only=True)
class BackendResult:
    """Result of one backend over all timed rounds."""

    backend: str
    median_s: float
    p99_s: float
    worst_s: float
    worst_over_median: float
    """Length of the tail: 1 if every round takes the same time."""
    rounds: int
    """Timed rounds; fewer than requested if the wait limit was reached."""
    gave_up: bool
    """Whether the last call timed out; its time is then the wait, a lower bound."""
    arrived: float
    """Fraction of the chunks that arrived, mean over ranks and rounds."""
    loss_measured: float | None
    """Fraction of the datagrams that fault injection dropped; None without fault injection."""
    tcp: str | None
    """Congestion control of its connections, as reported by the kernel; None without TCP."""
    times_s: list[float]

    @property
    def median_is_bound(self) -> bool:
        """Whether the median is a lower bound, as it rests on a call that timed out."""
        return self.gave_up and self.rounds <= 2


@dataclass(frozen=True, kw_only=True)
class AllReduceResult(BackendResult):
    """Result of all-reduces of one size."""

    mb: float
    ideal_s: float | None
    """Ideal time; None without a known limit."""
    gbit_per_s: float
    """Data that each host must send and receive, 2(n-1)/n of the tensor, in 10^9 bits, divided by the median."""
    repaired: float
    """Retransmitted chunks per round, of all ranks."""
    cpu_s_per_gb: float
    """CPU seconds of all ranks per 10^9 bytes of the tensor; the tensor counts once, not per rank."""

    @property
    def over_ideal(self) -> float | None:
        """Median divided by the ideal time."""
        return self.median_s / self.ideal_s if self.ideal_s else None


Result = TypeVar("Result", bound=BackendResult)


@dataclass(frozen=True)
class BenchReport(Generic[Result]):
    """Results with the conditions of their measurement."""

    conditions: dict[str, Any]
    results: list[Result]
    calls: list[Sample]
    """Every timed call, in order; not part of the JSON."""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"conditions": self.conditions, "results": [asdict(result) for result in self.results]}

    def write(self, path: Path) -> None:
        """Writes JSON and creates missing folders."""
        write_json(path, self.to_json())


AllReduceReport: TypeAlias = BenchReport[AllReduceResult]


def ideal_s(hosts: int, size_bytes: float, rate_bits: float) -> float:
    """Seconds that a link of that rate needs for the data that each host must send and receive."""
    return 2 * (hosts - 1) / hosts * size_bytes * 8 / rate_bits


def ideal_bytes(hosts: int, seconds: float, rate_bits: float) -> float:
    """Size of the tensor with that ideal time."""
    return seconds / ideal_s(hosts, 1, rate_bits)


def summarize(
    log: Log, backends: Sequence[str], sizes_mb: Sequence[float], hosts: int, rate_bits: float | None
) -> list[AllReduceResult]:
    """One result per size and backend with at least one begun call."""
    results = []
    for mb in sizes_mb:
        # The ranks round a size down to whole elements.
        size = round(mb * 1e6)
        of_size = [sample for sample in log.samples if size - 4 < sample.bytes <= size]
        copies_s = [sample.seconds for sample in of_size if sample.backend == Copies.name]
        ideal = median(copies_s) if copies_s else ideal_s(hosts, size, rate_bits) if rate_bits else None
        for name in backends:
            samples = [sample for sample in of_size if sample.backend == name]
            if samples:
                results.append(_result(log, name, mb, samples, ideal, hosts))
    return results


def _result(log: Log, name: str, mb: float, samples: list[Sample], ideal: float | None, hosts: int) -> AllReduceResult:
    return AllReduceResult(
        mb=mb,
        ideal_s=ideal,
        gbit_per_s=ideal_s(hosts, mb * 1e6, 1e9) / median([sample.seconds for sample in samples]),
        repaired=sum(sample.repaired for sample in samples) / len(samples),
        cpu_s_per_gb=cpu_s_per_gb(samples),
        **statistics(log, name, samples),
    )


def cpu_s_per_gb(samples: Sequence[Sample]) -> float:
    """Processor seconds of all ranks per 10^9 bytes of the tensor, which counts once, over these calls."""
    return sum(sample.cpu_s for sample in samples) / sum(sample.bytes for sample in samples) * 1e9


def statistics(log: Log, name: str, samples: list[Sample]) -> dict[str, Any]:
    """Fields of every `BackendResult`."""
    times_s = [sample.seconds for sample in samples]
    counters = log.counters.get((name, samples[0].bytes))
    return {
        "backend": name,
        "median_s": median(times_s),
        "p99_s": percentile(times_s, 99),
        "worst_s": max(times_s),
        "worst_over_median": max(times_s) / median(times_s),
        "rounds": len(samples),
        "gave_up": samples[-1].gave_up,
        "arrived": sum(sample.arrived for sample in samples) / len(samples),
        "loss_measured": counters.loss if counters is not None and counters.seen else None,
        "tcp": log.tcp.get(name),
        "times_s": times_s,
    }

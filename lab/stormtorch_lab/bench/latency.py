"""Latency of small messages: all-reduce of 1 KB to 1 MB against gloo, and the cost of an idle engine."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stormtorch.checks import check_between
from stormtorch.collectives import Group, barrier
from stormtorch.exchange.options import Options
from stormtorch.exchange.reliability import EXACT
from stormtorch.telemetry.json_files import write_json
from stormtorch.telemetry.progress import Advance, ignore_progress
from stormtorch.telemetry.statistics import median, percentile
from stormtorch_lab.bench.backends import BACKENDS, MPI, Storm, check_backends
from stormtorch_lab.bench.results import CPU, cpu_s_per_gb
from stormtorch_lab.bench.rounds import Schedule, run_rounds
from stormtorch_lab.jobs.control import BARRIER, TIMES
from stormtorch_lab.jobs.counters import Log, merge
from stormtorch_lab.jobs.gloo import gloo_group
from stormtorch_lab.jobs.launch import run_local
from stormtorch_lab.jobs.ranks import LOOPBACK, Member
from stormtorch_lab.jobs.surroundings import surroundings

SIZES_BYTES = (1_000, 4_000, 16_000, 64_000, 256_000, 1_000_000)


@dataclass(frozen=True, kw_only=True)
class LatencySettings:
    """Settings of the benchmark."""

    ranks: int = 2
    """Processes of this machine."""
    iters: int = 200
    """Timed rounds per size, and empty exchanges."""
    warmup: int = 20
    """Rounds before them that are checked but not counted."""
    backends: tuple[str, ...] = BACKENDS
    idle_s: float = 3.0
    """Seconds for which the CPU time of connected, idle transports is measured."""
    timeout_s: float = 600.0
    """Seconds after which the benchmark times out."""

    def __post_init__(self) -> None:
        check_between("ranks", self.ranks, 2, 64)
        check_between("iters", self.iters, 1, 1_000_000)
        check_between("warmup", self.warmup, 0, 1_000_000)
        check_backends(self.backends, None, here=(MPI,))
        check_between("idle_s", self.idle_s, 0.1, 600)
        check_between("timeout_s", self.timeout_s, 1, 1e6)


@dataclass(frozen=True, kw_only=True)
class LatencyResult:
    """Result of one backend at one size, over all timed rounds."""

    backend: str
    bytes: int
    median_s: float
    p99_s: float
    worst_s: float
    arrived: float
    cpu_s: float
    """Mean CPU seconds of all ranks per call."""
    cpu_s_per_gb: float
    """CPU seconds of all ranks per 10^9 bytes of the tensor; the tensor counts once, not per rank."""


@dataclass(frozen=True)
class LatencyReport:
    """Results with the conditions of their measurement."""

    conditions: dict[str, Any]
    results: list[LatencyResult]
    empty_exchange_s: dict[str, float]
    """Median of an exchange of empty messages between two ranks, back to back, by storm and by gloo."""
    idle_cpu_percent: dict[str, float]
    """CPU use in percent of one core, on the busiest rank: all threads of a process that is connected and idle."""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    def write(self, path: Path) -> None:
        """Writes JSON and creates missing folders."""
        write_json(path, self.to_json())


@dataclass(frozen=True)
class _RankLatency:
    log: Log
    empty_s: dict[str, list[float]]
    """Times of each kind, one per exchange; empty on ranks that do not take part."""
    idle_cpu: dict[str, float]


def run_latency(settings: LatencySettings, advance: Advance = ignore_progress) -> LatencyReport:
    """Runs the benchmark, and returns when all ranks have ended.

    Raises:
        stormtorch_lab.jobs.failed.RankFailed: A rank failed, gave a wrong sum, or timed out.
    """
    conditions = {
        "ranks": settings.ranks,
        "iters": settings.iters,
        "warmup": settings.warmup,
        "backends": list(settings.backends),
        "dtype": "float32",
        "rate": None,
        "loss_requested": 0.0,
        "times": TIMES,
        "cpu": CPU,
        "barrier": BARRIER,
        "idle_s": settings.idle_s,
        "empty_exchange": "ranks 0 and 1, back to back; slower of the two, median",
    } | surroundings()
    ranks, where = run_local(
        _rank_latency,
        settings.ranks,
        (settings,),
        timeout_s=settings.timeout_s,
        advance=advance,
        by_mpi=MPI in settings.backends,
    )
    log = merge([rank.log for rank in ranks])
    results = []
    for size in SIZES_BYTES:
        for name in settings.backends:
            samples = [sample for sample in log.samples if (sample.backend, sample.bytes) == (name, size)]
            times_s = [sample.seconds for sample in samples]
            results.append(
                LatencyResult(
                    backend=name,
                    bytes=size,
                    median_s=median(times_s),
                    p99_s=percentile(times_s, 99),
                    worst_s=max(times_s),
                    arrived=sum(sample.arrived for sample in samples) / len(samples),
                    cpu_s=sum(sample.cpu_s for sample in samples) / len(samples),
                    cpu_s_per_gb=cpu_s_per_gb(samples),
                )
            )
    empty_s = {
        kind: median([max(pair) for pair in zip(ranks[0].empty_s[kind], ranks[1].empty_s[kind], strict=True)])
        for kind in ranks[0].empty_s
    }
    idle = {kind: 100 * max(rank.idle_cpu[kind] for rank in ranks) for kind in ranks[0].idle_cpu}
    return LatencyReport(conditions | where, results, empty_s, idle)


def _rank_latency(member: Member, settings: LatencySettings) -> _RankLatency:
    # One after the other, so that each idles alone: gloo's thread wakes up occasionally.
    idle_cpu, empty_s = {}, {}
    storm = Storm("idle", member, Options(interface=LOOPBACK), EXACT)
    idle_cpu["storm"] = _idle_cpu(lambda: barrier(storm.group).wait(), settings.idle_s)
    if member.rank < 2:
        pair = Group(storm.transport, (0, 1), name="pair")
        empty_s["storm"] = _timed_calls(lambda: barrier(pair).wait(), settings)
    storm.close()
    gloo = gloo_group(member, "idle")
    idle_cpu["gloo"] = _idle_cpu(lambda: gloo.barrier().wait(), settings.idle_s)
    if member.rank < 2:
        gloo_pair = gloo_group(member, "pair", world=2)
        empty_s["gloo"] = _timed_calls(lambda: gloo_pair.barrier().wait(), settings)
    schedule = Schedule(
        backends=settings.backends, sizes_bytes=SIZES_BYTES, iters=settings.iters, warmup=settings.warmup
    )
    return _RankLatency(run_rounds(member, schedule), empty_s, idle_cpu)


def _idle_cpu(barrier: Callable[[], object], idle_s: float) -> float:
    barrier()
    time.sleep(0.2)  # let the work of connecting finish first
    cpu_s, begin = time.process_time(), time.perf_counter()
    time.sleep(idle_s)
    used = (time.process_time() - cpu_s) / (time.perf_counter() - begin)
    barrier()
    return used


def _timed_calls(call: Callable[[], object], settings: LatencySettings) -> list[float]:
    times_s = []
    for index in range(settings.warmup + settings.iters):
        begin = time.perf_counter()
        call()
        if index >= settings.warmup:
            times_s.append(time.perf_counter() - begin)
    return times_s

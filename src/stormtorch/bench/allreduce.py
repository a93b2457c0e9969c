"""All-reduce of large tensors on loopback, beside gloo, in interleaved rounds.

report = run_allreduce(AllReduceSettings(hosts=4, mb=(25.0,), loss=0.01))
report.write(Path("allreduce.json"))
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from stormtorch.bench.backends import BACKENDS, DTYPES, Copies, Counters
from stormtorch.bench.conditions import surroundings, write_json
from stormtorch.bench.display import (
    Advance,
    crowding_text,
    ignore_progress,
    loss_text,
    new_table,
    ratio_text,
    share_text,
    size_text,
    time_text,
)
from stormtorch.bench.ranks import run_ranks
from stormtorch.bench.rounds import BARRIER, TIMES, Schedule, run_rounds
from stormtorch.bench.samples import Log, Sample, median, merge, percentile
from stormtorch.bench.settings import BadSetting, check_between, check_subset


@dataclass(frozen=True, kw_only=True)
class AllReduceSettings:
    """What to measure."""

    hosts: int = 2
    """Ranks, each a process of this machine."""
    mb: tuple[float, ...] = (25.0,)
    """Sizes of the tensor in 10^6 bytes."""
    iters: int = 20
    """Timed rounds per size."""
    warmup: int = 3
    """Rounds before them that are checked but not counted."""
    backends: tuple[str, ...] = BACKENDS
    loss: float = 0.0
    """Fraction of the datagrams lost by fault injection; TCP peers cannot feel it."""
    seed: int = 0
    """Of the injected loss."""
    dtype: str = "float32"
    datagram_bytes: int | None = None
    """Of the storm backends; None lets them choose."""
    timeout_s: float = 600.0
    """For everything."""

    def __post_init__(self) -> None:
        check_between("hosts", self.hosts, 2, 64)
        if not self.mb:
            raise BadSetting("mb", "must name at least one size")
        for size in self.mb:
            check_between("mb", size, 1e-5, 10_000)
        if len(set(self.mb)) != len(self.mb):
            raise BadSetting("mb", "must name each size only once")
        check_between("iters", self.iters, 1, 1_000_000)
        check_between("warmup", self.warmup, 0, 1_000_000)
        check_subset("backends", self.backends, BACKENDS)
        # Nearer to 1, exact transfers hardly end.
        check_between("loss", self.loss, 0.0, 0.9)
        check_between("seed", self.seed, 0, 2**63)
        check_subset("dtype", (self.dtype,), tuple(DTYPES))
        if self.datagram_bytes is not None:
            check_between("datagram_bytes", self.datagram_bytes, 256, 65507)
        check_between("timeout_s", self.timeout_s, 1, 1e6)


@dataclass(frozen=True, kw_only=True)
class AllReduceResult:
    """One backend at one size, over all timed rounds."""

    backend: str
    mb: float
    median_s: float
    p99_s: float
    worst_s: float
    ideal_s: float
    arrived: float
    """Fraction of the chunks, mean over ranks and rounds."""
    repaired: float
    """Chunks sent again in a round, by all ranks."""
    cpu_s_per_gb: float
    """CPU seconds of all ranks per 10^9 bytes of tensor."""
    loss_measured: float | None
    """Fraction of the datagrams that fault injection lost; None where it has no hands in."""
    times_s: list[float]


@dataclass(frozen=True)
class AllReduceReport:
    """What came out, under which conditions."""

    conditions: dict[str, Any]
    results: list[AllReduceResult]
    calls: list[Sample]
    """Every timed call, in order; not part of the JSON."""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"conditions": self.conditions, "results": [asdict(result) for result in self.results]}

    def write(self, path: Path) -> None:
        """As JSON; makes missing folders."""
        write_json(path, self.to_json())


def run_allreduce(settings: AllReduceSettings, advance: Advance = ignore_progress) -> AllReduceReport:
    """Measures, and returns when all ranks are gone.

    Raises:
        stormtorch.bench.failed.RankFailed: A rank failed, gave a wrong sum, or did not end in time.
    """
    conditions = _requested(settings) | surroundings()
    schedule = Schedule(
        backends=settings.backends,
        sizes_bytes=tuple(round(size * 1e6) for size in settings.mb),
        iters=settings.iters,
        warmup=settings.warmup,
        loss=settings.loss,
        seed=settings.seed,
        dtype=settings.dtype,
        datagram_bytes=settings.datagram_bytes,
        ideal=True,
    )
    done = 0

    def listen(_rank: int, what: object) -> None:
        nonlocal done
        done += 1
        assert isinstance(what, tuple)
        advance(f"{size_text(what[0])} on {settings.hosts} ranks", done)

    log = merge(run_ranks(run_rounds, settings.hosts, (schedule,), timeout_s=settings.timeout_s, listen=listen))
    lossy = [counters for counters in log.counters.values() if counters.seen]
    conditions["loss_measured"] = sum(lossy, Counters()).loss
    conditions["kernel_drops"] = sum(counters.kernel_drops for counters in log.counters.values())
    conditions["chunk_bytes"] = log.chunk_bytes
    return AllReduceReport(conditions, _summarize(settings, schedule, log), log.samples)


def _requested(settings: AllReduceSettings) -> dict[str, Any]:
    return {
        "hosts": settings.hosts,
        "mb": list(settings.mb),
        "iters": settings.iters,
        "warmup": settings.warmup,
        "backends": list(settings.backends),
        "dtype": settings.dtype,
        "network": "loopback",
        "rate": None,
        "loss_requested": settings.loss,
        "loss_applies_to": [name for name in settings.backends if name != "gloo"] if settings.loss else [],
        "seed": settings.seed,
        "datagram_bytes": settings.datagram_bytes,
        "ideal": Copies.MEANING,
        "times": TIMES,
        "barrier": BARRIER,
        "order": "every round calls every backend once; each round begins with another one",
    }


def _summarize(settings: AllReduceSettings, schedule: Schedule, log: Log) -> list[AllReduceResult]:
    results = []
    for mb, size in zip(settings.mb, schedule.sizes_bytes, strict=True):
        # The ranks round a size down to whole elements.
        of_size = [sample for sample in log.samples if size - 4 < sample.bytes <= size]
        ideal_s = median([sample.seconds for sample in of_size if sample.backend == Copies.name])
        for name in settings.backends:
            samples = [sample for sample in of_size if sample.backend == name]
            times_s = [sample.seconds for sample in samples]
            counters = log.counters.get((name, samples[0].bytes))
            gigabytes = sum(sample.bytes for sample in samples) / 1e9
            results.append(
                AllReduceResult(
                    backend=name,
                    mb=mb,
                    median_s=median(times_s),
                    p99_s=percentile(times_s, 99),
                    worst_s=max(times_s),
                    ideal_s=ideal_s,
                    arrived=sum(sample.arrived for sample in samples) / len(samples),
                    repaired=sum(sample.repaired for sample in samples) / len(samples),
                    cpu_s_per_gb=sum(sample.cpu_s for sample in samples) / gigabytes,
                    loss_measured=counters.loss if counters is not None and counters.seen else None,
                    times_s=times_s,
                )
            )
    return results


def allreduce_table(report: AllReduceReport) -> Table:
    """One row per backend and size."""
    conditions = report.conditions
    title = f"all-reduce of {conditions['dtype']} over {conditions['hosts']} ranks, loopback"
    table = new_table(title, _caption(conditions))
    table.add_column("size", justify="right")
    table.add_column("backend", no_wrap=True)
    for heading in ("median", "p99", "worst", "x\ngloo", "x\nideal", "arrived", "CPU\ns/GB"):
        table.add_column(heading, justify="right", no_wrap=True)
    for mb in conditions["mb"]:
        rows = [result for result in report.results if result.mb == mb]
        gloo_s = next((result.median_s for result in rows if result.backend == "gloo"), None)
        for result in rows:
            table.add_row(
                size_text(round(mb * 1e6)) if result is rows[0] else "",
                result.backend,
                time_text(result.median_s),
                time_text(result.p99_s),
                time_text(result.worst_s),
                ratio_text(result.median_s / gloo_s if gloo_s else None),
                ratio_text(result.median_s / result.ideal_s),
                share_text(result.arrived),
                f"{result.cpu_s_per_gb:.2f}",
            )
        table.add_row("", "ideal", time_text(rows[0].ideal_s), style="dim", end_section=True)
    return table


def _caption(conditions: dict[str, Any]) -> str:
    text = (
        f"{conditions['iters']} interleaved rounds; times are the slowest rank's; x: ratio of medians, below 1 is "
        "faster. Ideal: the time to copy as many bytes once in and once out, on all ranks at once."
    )
    text += crowding_text(conditions["hosts"], conditions["machine"]["cores_usable"])
    if conditions["loss_requested"]:
        text += (
            f" Injected loss: {loss_text(conditions['loss_requested'])} asked, "
            f"{loss_text(conditions['loss_measured'])} measured, for the storm backends only. "
            "gloo ran without loss: it cannot be injected below TCP without root."
        )
    if conditions["kernel_drops"]:
        text += f" The kernel dropped {conditions['kernel_drops']} datagrams for want of buffer."
    return text

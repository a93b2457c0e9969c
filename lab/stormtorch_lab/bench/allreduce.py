"""All-reduce of large tensors against gloo, in interleaved rounds: on loopback, or on the hosts of a lab.

report = run_allreduce(AllReduceSettings(ranks=4, mb=(25.0,), faults=0.01))
report = run_allreduce(AllReduceSettings(ranks=4, network=Conditions(rate="400mbit", loss=0.1), backends=LAB_DEFAULT))
report.write(Path("allreduce.json"))
"""

from dataclasses import dataclass
from typing import Any

from stormtorch.checks import BadSetting, check_between, check_subset
from stormtorch.telemetry.progress import Advance, ignore_progress
from stormtorch_lab.bench.backends import (
    BACKENDS,
    DTYPES,
    FLAT,
    MPI,
    ONE_LANE,
    Copies,
    check_backends,
    congestion_controls,
)
from stormtorch_lab.bench.results import CPU, AllReduceReport, summarize
from stormtorch_lab.bench.rounds import Schedule, run_rounds
from stormtorch_lab.jobs.control import BARRIER, ORDER, TIMES
from stormtorch_lab.jobs.counters import Counters, Log, merge
from stormtorch_lab.jobs.launch import open_lab, run_in_lab, run_local
from stormtorch_lab.jobs.surroundings import surroundings
from stormtorch_lab.netns.conditions import Conditions
from stormtorch_lab.netns.lab import Lab

LINE_IDEAL = (
    "computed: 2(n-1)/n x bytes x 8 / rate, the data that each of n hosts must send and receive, at the rate of its "
    "link: no headers, no loss, no round trips, no other traffic"
)


@dataclass(frozen=True, kw_only=True)
class AllReduceSettings:
    """Settings of the benchmark."""

    ranks: int = 2
    """Processes of this machine, or of the hosts of a lab."""
    ranks_per_host: int = 1
    """Ranks on each host of a lab."""
    mb: tuple[float, ...] = (25.0,)
    """Sizes of the tensor in 10^6 bytes."""
    iters: int = 20
    """Timed rounds per size."""
    warmup: int = 3
    """Rounds before them that are checked but not counted."""
    backends: tuple[str, ...] = BACKENDS
    network: Conditions | None = None
    """Conditions of a lab, whose loss affects all backends, or a cable between two hosts; None is loopback."""
    faults: float = 0.0
    """Fraction of the datagrams dropped by fault injection, on loopback; TCP backends lose none."""
    seed: int = 0
    """Seed of the injected loss."""
    dtype: str = "float32"
    datagram_bytes: int | None = None
    """Payload of a datagram of the storm backends; None lets them choose."""
    patience_s: float = 30.0
    """Wait limit in seconds, in a lab: a call over TCP is aborted after it; a backend whose rounds have taken as long
    skips the remaining ones."""
    timeout_s: float = 600.0
    """Seconds after which the benchmark times out."""

    def __post_init__(self) -> None:
        check_between("ranks", self.ranks, 2, 64)
        check_between("ranks_per_host", self.ranks_per_host, 1, 32)
        if self.ranks_per_host > 1 and self.network is None:
            raise BadSetting("ranks_per_host", "needs a lab, as loopback has one host: give a --rate")
        if self.ranks % self.ranks_per_host or self.hosts < 2:
            raise BadSetting("ranks_per_host", f"must divide the ranks, {self.ranks}, among two hosts or more")
        if not self.mb:
            raise BadSetting("mb", "must name at least one size")
        for size in self.mb:
            check_between("mb", size, 1e-5, 10_000)
        if len(set(self.mb)) != len(self.mb):
            raise BadSetting("mb", "must name each size only once")
        check_between("iters", self.iters, 1, 1_000_000)
        check_between("warmup", self.warmup, 0, 1_000_000)
        check_backends(self.backends, self.network, known=(*BACKENDS, ONE_LANE), further=(FLAT,), here=(MPI,))
        if MPI in self.backends and self.dtype != "float32":
            raise BadSetting("dtype", "must be float32 beside mpi, which has no shorter formats")
        if self.network is not None:
            self.network.check(self.hosts)
        # Closer to 1, exact transfers hardly finish.
        check_between("faults", self.faults, 0.0, 0.9)
        if self.faults and self.network is not None:
            raise BadSetting("faults", "are for loopback only; in a lab, give --loss")
        check_between("seed", self.seed, 0, 2**63)
        check_subset("dtype", (self.dtype,), tuple(DTYPES))
        if self.datagram_bytes is not None:
            check_between("datagram_bytes", self.datagram_bytes, 256, 65507)
        check_between("patience_s", self.patience_s, 0.1, 1e5)
        check_between("timeout_s", self.timeout_s, 1, 1e6)

    @property
    def hosts(self) -> int:
        """Number of hosts of a lab."""
        return self.ranks // self.ranks_per_host


def run_allreduce(settings: AllReduceSettings, advance: Advance = ignore_progress) -> AllReduceReport:
    """Runs the benchmark, and returns when all ranks have ended.

    Raises:
        stormtorch_lab.jobs.failed.RankFailed: A rank failed, gave a wrong sum, or timed out.
        stormtorch_lab.netns.LabError: The lab failed, or this machine cannot make one.
    """
    if settings.network is not None:
        with open_lab(settings.hosts, settings.network, congestion_controls(settings.backends)) as lab:
            return run_allreduce_in(lab, settings, advance)
    conditions = _requested(settings) | surroundings()
    logs, where = run_local(
        run_rounds,
        settings.ranks,
        (_schedule(settings),),
        timeout_s=settings.timeout_s,
        advance=advance,
        by_mpi=MPI in settings.backends,
    )
    log = merge(logs)
    lossy = [counters for counters in log.counters.values() if counters.seen]
    conditions |= where | {
        "ideal": Copies.MEANING,
        "faults_requested": settings.faults,
        "faults_apply_to": [name for name in settings.backends if name.startswith("storm")] if settings.faults else [],
        "seed": settings.seed,
        "loss_measured": sum(lossy, Counters()).loss,
    }
    return _report(settings, conditions, log)


def run_allreduce_in(lab: Lab, settings: AllReduceSettings, advance: Advance = ignore_progress) -> AllReduceReport:
    """Measures in a lab with the requested conditions; the loss begins when all results are checked."""
    assert settings.network is not None
    conditions = _requested(settings) | surroundings()
    logs, where = run_in_lab(
        run_rounds,
        lab,
        settings.network,
        settings.hosts,
        (_schedule(settings),),
        timeout_s=settings.timeout_s,
        advance=advance,
        per_host=settings.ranks_per_host,
    )
    ideal = LINE_IDEAL if settings.network.cable is None else Copies.MEANING
    conditions |= where | {"ideal": ideal, "patience_s": settings.patience_s}
    return _report(settings, conditions, merge(logs))


def _schedule(settings: AllReduceSettings) -> Schedule:
    network = settings.network
    lab = network is not None
    return Schedule(
        backends=settings.backends,
        sizes_bytes=tuple(round(size * 1e6) for size in settings.mb),
        iters=settings.iters,
        warmup=settings.warmup,
        faults=settings.faults,
        seed=settings.seed,
        dtype=settings.dtype,
        datagram_bytes=settings.datagram_bytes,
        # Without a rate, the limit is how fast the machine can copy.
        ideal=network is None or network.cable is not None,
        patience_s=settings.patience_s if lab else None,
        lab=lab,
    )


def _requested(settings: AllReduceSettings) -> dict[str, Any]:
    return {
        "ranks": settings.ranks,
        "ranks_per_host": settings.ranks_per_host,
        "mb": list(settings.mb),
        "iters": settings.iters,
        "warmup": settings.warmup,
        "backends": list(settings.backends),
        "dtype": settings.dtype,
        "datagram_bytes": settings.datagram_bytes,
        "times": TIMES,
        "cpu": CPU,
        "barrier": BARRIER,
        "order": ORDER,
    }


def _report(settings: AllReduceSettings, conditions: dict[str, Any], log: Log) -> AllReduceReport:
    conditions["kernel_drops"] = sum(counters.kernel_drops for counters in log.counters.values())
    conditions["chunk_bytes"] = log.chunk_bytes
    rate_bits = None if settings.network is None else settings.network.rate_bits
    results = summarize(log, settings.backends, settings.mb, settings.hosts, rate_bits)
    return AllReduceReport(conditions, results, log.samples)

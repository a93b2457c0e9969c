"""All-reduce of large tensors beside gloo, in interleaved rounds: on loopback, or on the hosts of a lab.

report = run_allreduce(AllReduceSettings(hosts=4, mb=(25.0,), faults=0.01))
report = run_allreduce(AllReduceSettings(hosts=4, network=Conditions(rate="400mbit", loss=0.1), backends=LAB_DEFAULT))
report.write(Path("allreduce.json"))
"""

from dataclasses import dataclass
from typing import Any

from stormtorch.bench.backends import BACKENDS, DTYPES, LAB_BACKENDS, Copies, Counters
from stormtorch.bench.conditions import surroundings
from stormtorch.bench.display import Advance, ignore_progress, size_text
from stormtorch.bench.ranks import run_ranks
from stormtorch.bench.results import AllReduceReport, summarize
from stormtorch.bench.rounds import BARRIER, TIMES, Cue, Schedule, run_rounds
from stormtorch.bench.samples import Log, merge
from stormtorch.bench.settings import BadSetting, check_between, check_subset
from stormtorch.lab.access import checked_tcp
from stormtorch.lab.conditions import Conditions
from stormtorch.lab.lab import Lab
from stormtorch.lab.measured import Measured

LINE_IDEAL = (
    "computed: 2(n-1)/n x bytes x 8 / rate, what every rank must send and receive, at the rate of its line with "
    "nothing else on it: no headers, no loss, no round trips"
)


@dataclass(frozen=True, kw_only=True)
class AllReduceSettings:
    """What to measure."""

    hosts: int = 2
    """Ranks, each a process of this machine, or on a host of its own in a lab."""
    mb: tuple[float, ...] = (25.0,)
    """Sizes of the tensor in 10^6 bytes."""
    iters: int = 20
    """Timed rounds per size."""
    warmup: int = 3
    """Rounds before them that are checked but not counted."""
    backends: tuple[str, ...] = BACKENDS
    network: Conditions | None = None
    """Of the lab, where loss is real and meets all backends; None is loopback."""
    faults: float = 0.0
    """On loopback: fraction of the datagrams lost by fault injection; TCP peers cannot feel it."""
    seed: int = 0
    """Of the injected loss."""
    dtype: str = "float32"
    datagram_bytes: int | None = None
    """Of the storm backends; None lets them choose."""
    patience_s: float = 30.0
    """In a lab: a call over TCP is given up after so long, and a backend whose rounds have taken as long sits out the
    others."""
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
        self._check_backends()
        # Nearer to 1, exact transfers hardly end.
        check_between("faults", self.faults, 0.0, 0.9)
        if self.faults and self.network is not None:
            raise BadSetting("faults", "are for loopback; in a lab, loss is real")
        check_between("seed", self.seed, 0, 2**63)
        check_subset("dtype", (self.dtype,), tuple(DTYPES))
        if self.datagram_bytes is not None:
            check_between("datagram_bytes", self.datagram_bytes, 256, 65507)
        check_between("patience_s", self.patience_s, 0.1, 1e5)
        check_between("timeout_s", self.timeout_s, 1, 1e6)

    def _check_backends(self) -> None:
        check_subset("backends", self.backends, LAB_BACKENDS)
        for name in self.backends:
            if self.network is None and name not in BACKENDS:
                raise BadSetting("backends", f"knows {name} only in a lab; here {', '.join(BACKENDS)}")


def run_allreduce(settings: AllReduceSettings, advance: Advance = ignore_progress) -> AllReduceReport:
    """Measures, and returns when all ranks are gone.

    Raises:
        stormtorch.bench.failed.RankFailed: A rank failed, gave a wrong sum, or did not end in time.
        stormtorch.lab.LabError: The lab failed, or none can be made here.
    """
    if settings.network is None:
        return _run_on_loopback(settings, advance)
    with open_lab(settings.hosts, settings.network, settings.backends) as lab:
        return run_in_lab(lab, settings, advance)


def open_lab(hosts: int, network: Conditions, backends: tuple[str, ...]) -> Lab:
    """The lab for that, without loss at first; for a `with` statement."""
    for name in backends:
        if name not in BACKENDS:
            checked_tcp(name.removeprefix("gloo-"))
    return Lab(hosts, network.changed(loss=0.0), management=True)


def run_in_lab(lab: Lab, settings: AllReduceSettings, advance: Advance = ignore_progress) -> AllReduceReport:
    """Measures in a lab whose other conditions are as asked for; the loss begins when all results were checked."""
    assert settings.network is not None
    loss = settings.network.loss
    conditions = _requested(settings) | surroundings()
    lab.set(loss=0.0)
    counts: list[Measured] = []

    def obey(cue: Cue) -> None:
        if cue is Cue.LOSE:
            lab.set(loss=loss)
        elif cue is Cue.COUNT and not counts:
            lab.reset()
        elif cue is Cue.READ:
            counts.append(lab.measured())

    log = _run(settings, advance, lab, obey)
    measured = counts[-1]
    conditions |= {
        "network": f"lab: {lab.kind}",
        "lab_made_by": lab.access.name,
        "ideal": LINE_IDEAL,
        "requested": lab.conditions.to_json(),
        "measured": measured.to_json(),
        "loss_measured": measured.loss,
        "overflow_measured": measured.overflow,
        "patience_s": settings.patience_s,
    }
    if lab.conditions.tcp is not None:
        conditions["tcp_congestion_control"] = lab.conditions.tcp
    return _report(settings, conditions, log)


def _run_on_loopback(settings: AllReduceSettings, advance: Advance) -> AllReduceReport:
    conditions = _requested(settings) | surroundings()
    log = _run(settings, advance)
    lossy = [counters for counters in log.counters.values() if counters.seen]
    conditions |= {
        "network": "loopback",
        "ideal": Copies.MEANING,
        "faults_requested": settings.faults,
        "faults_apply_to": [name for name in settings.backends if name != "gloo"] if settings.faults else [],
        "seed": settings.seed,
        "loss_measured": sum(lossy, Counters()).loss,
    }
    return _report(settings, conditions, log)


def _run(settings: AllReduceSettings, advance: Advance, lab: Lab | None = None, obey: Any = None) -> Log:
    schedule = Schedule(
        backends=settings.backends,
        sizes_bytes=tuple(round(size * 1e6) for size in settings.mb),
        iters=settings.iters,
        warmup=settings.warmup,
        faults=settings.faults,
        seed=settings.seed,
        dtype=settings.dtype,
        datagram_bytes=settings.datagram_bytes,
        ideal=lab is None,
        patience_s=settings.patience_s if lab is not None else None,
        lab=lab is not None,
    )
    done = 0

    def listen(_rank: int, what: object) -> None:
        nonlocal done
        if isinstance(what, Cue):
            obey(what)
        elif isinstance(what, tuple):
            done += 1
            advance(f"{size_text(what[0])} on {settings.hosts} {'ranks' if lab is None else 'hosts'}", done)

    return merge(
        run_ranks(run_rounds, settings.hosts, (schedule,), timeout_s=settings.timeout_s, listen=listen, lab=lab)
    )


def _requested(settings: AllReduceSettings) -> dict[str, Any]:
    return {
        "hosts": settings.hosts,
        "mb": list(settings.mb),
        "iters": settings.iters,
        "warmup": settings.warmup,
        "backends": list(settings.backends),
        "dtype": settings.dtype,
        "datagram_bytes": settings.datagram_bytes,
        "times": TIMES,
        "barrier": BARRIER,
        "order": "every round calls every backend once; each round begins with another one",
    }


def _report(settings: AllReduceSettings, conditions: dict[str, Any], log: Log) -> AllReduceReport:
    conditions["kernel_drops"] = sum(counters.kernel_drops for counters in log.counters.values())
    conditions["chunk_bytes"] = log.chunk_bytes
    rate_bits = None if settings.network is None else settings.network.rate_bits
    results = summarize(log, settings.backends, settings.mb, settings.hosts, rate_bits)
    return AllReduceReport(conditions, results, log.samples)

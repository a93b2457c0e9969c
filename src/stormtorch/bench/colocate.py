"""A web service beside a training on the same lines: what is asked for, and what came of it.

report = ColocateReport.begin(settings)
run_colocate(settings, report.runs.append)      # of bench/neighbours.py
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stormtorch.bench.service import ServiceResult
from stormtorch.checks import BadSetting, blaming, check_between, check_subset
from stormtorch.lab.conditions import Conditions
from stormtorch.results.report import without_nan, write_json
from stormtorch.results.statistics import mean
from stormtorch.results.surroundings import surroundings
from stormtorch.tasks.data.corpus import open_corpus
from stormtorch.tasks.models.llama import LlamaSize

NONE = "none"
"""Name of the training that is none: the service has the lines for itself."""
STORM = ("model-averaging", "bounded-drift")
"""Trainings by stormtorch, named by their policies."""
DDP, DDP_LOW = "ddp", "ddp-low"
"""Trainings by DistributedDataParallel on gloo: over TCP, of normal priority or marked as low."""
TRAININGS = (*STORM, DDP, DDP_LOW, NONE)
"""What can share the lines with the service."""
TURN = 4
"""Steps between two looks at the clock, which all ranks take together."""

SERVICE = (
    "nginx on every host; requests from everyone to everyone else, a Poisson process on each host, sent when they are "
    "due whatever became of those before (open loop); latency from when a request was due to its last byte, client's "
    "lateness included; failed requests have none and are counted"
)
TRAINING = (
    "one rank on each host, one torch thread; AdamW at a constant rate, betas 0.9 and 0.95; each stage of an exchange "
    "ends at its deadline with what has arrived, and nothing is sent again (ddp: everything arrives); bounded-drift "
    "has neither standby nor guard; loss: fraction of the chunks that did not arrive while the service was measured"
)
ALONE = (
    "the same training without the service, without deadline and without loss (same weights, batches and steps); then "
    "with deadlines: what is lost there, ranks lost by waiting for processors"
)


@dataclass(frozen=True, kw_only=True)
class ColocateSettings:
    """Settings of the benchmark."""

    ranks: int = 8
    """Hosts, each with a server, a client and a rank."""
    train: tuple[str, ...] = ("model-averaging", NONE)
    """Trainings beside the service, of `TRAININGS`."""
    prefer: tuple[float | None, ...] = (None, 0.3, 0.1, 0.02)
    """How strongly the service is preferred: the share of a line that the training has while the service wants it all
    (`Conditions.low_share`). None treats all packets alike, and marks none."""
    requests: tuple[float, ...] = (100.0, 200.0, 400.0)
    """Requests per second of all hosts together."""
    size: int = 100_000
    """Bytes of an answer."""
    seconds: float = 8.0
    """Seconds for which the service is measured in each run, at least; it goes on until the training has made its
    steps, and the training until it is over."""
    steps: int = 24
    """Steps after which the training is evaluated, a multiple of `TURN` or rounded up to one."""
    slack: float = 1.5
    """Deadline of a stage of an exchange, as a multiple of the time that it takes alone, which is measured first."""
    deadline_s: float | None = None
    """Deadline in seconds, in place of `slack`."""
    at_latency_s: float = 0.02
    """Mean latency at which the requests that are carried are compared."""
    network: Conditions = field(default_factory=lambda: Conditions(rate="100mbit"))
    """Conditions of the lab; `prefer` sets its `low_share`."""
    layers: int = 2
    width: int = 128
    """Width of the model, a multiple of 64: 2 layers of 128 have 0.43 million parameters."""
    batch: int = 8
    """Sequences that each rank learns from in a step."""
    context: int = 64
    """Bytes of a sequence."""
    lr: float = 1e-3
    text: Path | None = None
    """Text to read, as a file or WikiText-2's folder; None is the source of Python's standard library."""
    seeds: int = 1
    """Runs of everything, each with weights, batches and arrivals of its own."""
    first_seed: int = 0
    request_timeout_s: float = 5.0
    """Seconds after which a request has failed."""
    timeout_s: float = 3600.0
    """Seconds after which everything must have ended."""

    def __post_init__(self) -> None:
        check_between("ranks", self.ranks, 2, 64)
        check_subset("train", self.train, TRAININGS)
        _check_different("prefer", self.prefer)
        _check_different("requests", self.requests)
        for rate in self.requests:
            check_between("requests", rate, 0.1, 1e5)
        check_between("size", self.size, 1, 1 << 30)
        check_between("seconds", self.seconds, 1.0, 1e5)
        check_between("steps", self.steps, 1, 1_000_000)
        check_between("slack", self.slack, 0.1, 100.0)
        if self.deadline_s is not None:
            check_between("deadline", self.deadline_s, 1e-3, 100.0)
        check_between("at_latency", self.at_latency_s, 1e-6, 1e3)
        check_between("batch", self.batch, 1, 10_000)
        check_between("context", self.context, 1, 10_000)
        check_between("lr", self.lr, 1e-9, 10)
        check_between("seeds", self.seeds, 1, 1000)
        check_between("first_seed", self.first_seed, 0, 2**31)
        check_between("request_timeout", self.request_timeout_s, 0.01, 1e4)
        check_between("timeout_s", self.timeout_s, 10, 1e6)
        if self.network.rate is None:
            raise BadSetting("rate", "must be a rate: nobody waits on a line without a limit")
        for share in self.prefer:
            with blaming("prefer", "low_share"):
                self.network.changed(low_share=share)
        _ = self.model

    @property
    def model(self) -> LlamaSize:
        """Size of the model."""
        return LlamaSize(layers=self.layers, width=self.width, heads=max(self.width // 64, 1))

    @property
    def turns(self) -> int:
        """Turns of `TURN` steps until the training is evaluated."""
        return -(-self.steps // TURN)

    @property
    def limit_s(self) -> float:
        """Seconds after which a run ends, even if its training has not made its steps."""
        return max(4.0 * self.seconds, self.seconds + 60.0)

    def cases(self) -> list["Case"]:
        """All runs, in order: first each training alone, exact and then with deadlines; then, for each rate, everything
        else, each time from another start.
        """
        seeds = range(self.first_seed, self.first_seed + self.seeds)
        found = []
        for seed in seeds:
            for train in self.train:
                found += [Case(train=train, seed=seed)] if train != NONE else []
                found += [Case(train=train, seed=seed, requests=0.0)] if train in STORM else []
        for number, (seed, requests) in enumerate((seed, each) for seed in seeds for each in self.requests):
            beside = [
                Case(train=train, seed=seed, requests=requests, low_share=share)
                for train in self.train
                for share in self._shares(train)
            ]
            begin = number % len(beside)
            found += beside[begin:] + beside[:begin]
        return found

    def _shares(self, train: str) -> Sequence[float | None]:
        """Preferences that make a difference: to packets of normal priority, classes of others are all the same."""
        if train in (NONE, DDP):
            return (None,)
        # Of equal priority, ddp-low is ddp.
        twice = train == DDP_LOW and DDP in self.train and len(self.prefer) > 1
        return [share for share in self.prefer if share is not None] if twice else self.prefer


def _check_different(name: str, values: Sequence[object]) -> None:
    if not values or len(set(values)) != len(values):
        raise BadSetting(name, f"must have one value or more, each only once, got {','.join(map(str, values))!r}")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run."""

    train: str
    seed: int
    requests: float | None = None
    """Requests per second. None is the training alone and exact; 0 is the training alone with its deadlines, whose loss
    is that of ranks that wait for processors."""
    low_share: float | None = None
    """Share of a line that the training has while the service wants it all; None treats all packets alike."""

    @property
    def prefer(self) -> str:
        """The preference as commands write it."""
        return "equal" if self.low_share is None else f"{self.low_share:g}"

    def __str__(self) -> str:
        if not self.requests:
            return f"{self.train} alone{'' if self.requests is None else ' with deadlines'}"
        return f"{self.train}, {self.prefer}, {self.requests:g} requests/s"


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """Training of one run, over all ranks."""

    steps: int
    """Steps in all."""
    measured_steps: int
    """Steps while the service was measured."""
    step_s: float | None
    """Mean seconds of these steps."""
    loss: float | None
    """Fraction of the chunks that did not arrive, mean over both stages; None where there was no step to count."""
    loss_up: float | None
    """The same of stage 1, to owners."""
    loss_down: float | None
    """The same of stage 2, from owners."""
    bytes_per_step: float | None
    """Bytes of datagrams that a rank sends in a step; None under DDP."""
    deadline_s: float | None
    """Deadline of each stage; None waits for everything."""
    exchange_s: float | None
    """Median over steps of the longest time that a rank waits for both stages; None under DDP."""
    validation: float | None
    """Loss on held-out text after the fixed number of steps; None if they were not made in time."""
    last_validation: float | None
    """The same at the end of the run, after all `steps`."""
    validation_ratio: float | None = None
    """`validation` over that of the training alone."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What came of one run."""

    case: Case
    seconds: float
    """Seconds for which service and training were measured together."""
    service: ServiceResult | None
    training: TrainingResult | None
    line_use: float | None
    """Fraction of the hosts' lines in use, upwards, mean over hosts, all bytes counted; None without a training."""
    low_share: float | None
    """Share of low priority in the lab's conditions; None treats all packets alike."""
    drops: dict[str, Any]
    """Packets that passed the lines and those that found a queue full, of all and of low priority."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Runs of one case that differ in their seeds alone, as means."""

    train: str
    low_share: float | None
    requests: float
    runs: int
    mean_s: float | None
    p50_s: float | None
    p99_s: float | None
    per_s: float
    failed: int
    loss: float | None
    step_s: float | None
    validation: float | None
    validation_ratio: float | None
    speedup: float | None
    """Mean latency beside the same training of equal priority, over this one."""
    slowdown: float | None
    """Mean latency over that of the service alone."""

    @property
    def prefer(self) -> str:
        """The preference as commands write it."""
        return "equal" if self.low_share is None else f"{self.low_share:g}"


@dataclass(frozen=True, kw_only=True)
class Carried:
    """Requests per second that are carried at a fixed mean latency."""

    train: str
    low_share: float | None
    per_s: float
    bound: str
    """"": between two rates that were measured; "at least": all of them were faster; "below": all were slower."""


@dataclass(frozen=True)
class ColocateReport:
    """Results, and the conditions under which they came out; runs are added one by one."""

    conditions: dict[str, Any]
    runs: list[RunResult] = field(default_factory=list)

    @classmethod
    def begin(cls, settings: ColocateSettings) -> "ColocateReport":
        """Makes a report without any run.

        Raises:
            stormtorch.checks.BadSetting: There is nothing to learn from.
        """
        asked = asdict(settings) | {"network": settings.network.to_json(), "text": str(settings.text or "")}
        with blaming("data", "text"):
            corpus = open_corpus(settings.text).to_json()
        texts = {"service": SERVICE, "training": TRAINING, "alone": ALONE}
        return cls(surroundings() | {"settings": asked, "corpus": corpus} | texts)

    def rows(self) -> list[Row]:
        """One row for each case beside the service, over its seeds."""
        groups: dict[_Key, list[RunResult]] = {}
        for run in self.runs:
            if run.service is not None and run.case.requests:
                groups.setdefault((run.case.train, run.case.low_share, run.case.requests), []).append(run)
        means = {key: _mean([run.service.mean_s for run in runs if run.service]) for key, runs in groups.items()}
        return [
            _row(key, runs, _of_equal(means, key), means.get((NONE, None, key[2])))
            for key, runs in sorted(groups.items(), key=lambda each: _order(each[0]))
        ]

    def alone(self) -> dict[str, tuple[float | None, float | None, float | None]]:
        """For each training: seconds of a step alone, the deadline of a stage, and the loss with it but without the
        service, which is no fault of the network.
        """
        found: dict[str, tuple[float | None, float | None, float | None]] = {}
        for train in dict.fromkeys(run.case.train for run in self.runs if run.training is not None):
            exact, paced = (
                [run.training for run in self.runs if run.training and (run.case.train, run.case.requests) == key]
                for key in ((train, None), (train, 0.0))
            )
            step_s, loss = _mean([each.step_s for each in exact]), _mean([each.loss for each in paced])
            found[train] = (step_s, paced[0].deadline_s if paced else None, loss)
        return found

    def carried(self, latency_s: float) -> list[Carried]:
        """For each training and preference, the rate at which the mean latency is as given, on straight lines."""
        curves: dict[tuple[str, float | None], list[tuple[float, float]]] = {}
        for row in self.rows():
            if row.mean_s is not None:
                curves.setdefault((row.train, row.low_share), []).append((row.requests, row.mean_s))
        return [
            Carried(train=train, low_share=share, per_s=per_s, bound=bound)
            for (train, share), points in curves.items()
            for per_s, bound in [rate_at(points, latency_s)]
        ]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        latency_s = self.conditions["settings"]["at_latency_s"]
        return {
            "conditions": self.conditions,
            "summary": [asdict(row) | {"prefer": row.prefer} for row in self.rows()],
            "alone": {
                train: {"step_s": step_s, "deadline_s": deadline_s, "loss": loss}
                for train, (step_s, deadline_s, loss) in self.alone().items()
            },
            "carried": {"mean_s": latency_s, "results": [asdict(each) for each in self.carried(latency_s)]},
            "runs": [_run_json(run) for run in self.runs],
        }

    def write(self, path: Path) -> None:
        """Writes JSON; makes missing folders."""
        write_json(path, without_nan(self.to_json()))


def rate_at(points: Sequence[tuple[float, float]], latency_s: float) -> tuple[float, str]:
    """Rate at which a curve of (rate, latency), rates ascending, first reaches a latency; and "at least" or "below"
    where the curve ends before or begins behind it.
    """
    before: tuple[float, float] | None = None
    for rate, seconds in points:
        if seconds > latency_s:
            if before is None:
                return rate, "below"
            return before[0] + (rate - before[0]) * (latency_s - before[1]) / (seconds - before[1]), ""
        before = rate, seconds
    assert before is not None, "a curve has a point"
    return before[0], "at least"


_Key = tuple[str, float | None, float]


def _of_equal(means: Mapping[_Key, float | None], key: _Key) -> float | None:
    """Mean latency beside the same training of equal priority; of ddp-low, that is also ddp."""
    train, _, requests = key
    found = means.get((train, None, requests))
    return means.get((DDP, None, requests)) if found is None and train == DDP_LOW else found


def _order(key: _Key) -> tuple[int, float, float]:
    train, share, requests = key
    return -TRAININGS.index(train), -1.0 if share is None else 1.0 - share, requests


def _row(key: _Key, runs: Sequence[RunResult], equal_s: float | None, none_s: float | None) -> Row:
    train, share, requests = key
    services = [run.service for run in runs if run.service is not None]
    trainings = [run.training for run in runs if run.training is not None]
    mean_s = _mean([each.mean_s for each in services])
    return Row(
        train=train,
        low_share=share,
        requests=requests,
        runs=len(runs),
        mean_s=mean_s,
        p50_s=_mean([each.p50_s for each in services]),
        p99_s=_mean([each.p99_s for each in services]),
        per_s=mean([each.per_s for each in services]),
        failed=sum(sum(each.failed.values()) for each in services),
        loss=_mean([each.loss for each in trainings]),
        step_s=_mean([each.step_s for each in trainings]),
        validation=_mean([each.validation for each in trainings]),
        validation_ratio=_mean([each.validation_ratio for each in trainings]),
        speedup=None if train == NONE or mean_s is None or equal_s is None else equal_s / mean_s,
        slowdown=None if mean_s is None or none_s is None else mean_s / none_s,
    )


def _mean(values: Sequence[float | None]) -> float | None:
    """Mean of values that are all known; None if one is not, or if there is none."""
    known = [value for value in values if value is not None]
    return mean(known) if known and len(known) == len(values) else None


def _run_json(run: RunResult) -> dict[str, Any]:
    service = None if run.service is None else run.service.to_json()
    return asdict(run) | {"case": asdict(run.case) | {"prefer": run.case.prefer}, "service": service}

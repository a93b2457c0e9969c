"""Settings of `bench colocate`: a web service beside a training on the same links.

report = ColocateReport.begin(settings)         # of bench/services/colocate_results.py
run_colocate(settings, report.runs.append)      # of bench/services/colocate_run.py
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from stormtorch.checks import BadSetting, blaming, check_between, check_subset
from stormtorch_lab.netns.conditions import Conditions
from stormtorch_lab.tasks.models.llama import LlamaSize

NONE = "none"
"""Name for runs without a training, where the service has the links to itself."""
STORM = ("model-averaging", "lead")
"""Trainings by stormtorch, named by their policies."""
DDP, DDP_LOW = "ddp", "ddp-low"
"""Trainings by DistributedDataParallel on gloo over TCP, at normal or low priority."""
TRAININGS = (*STORM, DDP, DDP_LOW, NONE)
"""Trainings that can share the links with the service."""
STEPS_PER_CALL = 4
"""Steps between two checks of the clock, which are collective."""


YieldTo = Literal["queues", "latency", "classes"]
"""Ways in which a training of low priority yields: `Options.yield_to`."""


@dataclass(frozen=True, kw_only=True)
class ColocateSettings:
    """Settings of the benchmark."""

    ranks: int = 8
    """Number of hosts, each with a server, a client and a rank."""
    train: tuple[str, ...] = ("model-averaging", NONE)
    """Trainings beside the service, of `TRAININGS`."""
    prefer: tuple[float | None, ...] = (None, 0.3, 0.1, 0.02)
    """How strongly the service is preferred: the share of a link that the training keeps while the service could use
    all of it (`Conditions.low_share`). None treats all packets alike, and marks none."""
    yield_to: YieldTo = "classes"
    """How a training of low priority yields: "classes" only marks its packets, for the traffic classes of the links."""
    requests: tuple[float, ...] = (100.0, 200.0, 400.0)
    """Requests per second of all hosts together."""
    size: int = 100_000
    """Bytes of a response."""
    seconds: float = 10.0
    """Seconds of each run in which the service is measured: requests due in that time count. Service and training both
    run on until the time is over and the training has made its steps."""
    steps: int = 16
    """Steps after which the training is evaluated, a multiple of `STEPS_PER_CALL` or rounded up to one."""
    slack: float = 1.5
    """Deadline of each stage of an exchange, as a multiple of its time without the service, which is measured first."""
    deadline_s: float | None = None
    """Deadline of each stage in seconds, in place of `slack`."""
    allowed_loss: float | None = None
    """Fraction of loss that the training accepts to stay fast (`Policy.allowed_loss`), in place of a fixed deadline."""
    at_latency_s: float = 0.02
    """Mean latency at which the carried requests per second are compared."""
    network: Conditions = field(default_factory=lambda: Conditions(rate="100mbit"))
    """Conditions of the lab; `prefer` sets its `low_share`."""
    layers: int = 2
    width: int = 128
    """Width of the model, a multiple of 64: 2 layers of 128 have 0.43 million parameters."""
    batch: int = 8
    """Sequences of each rank per step."""
    context: int = 64
    """Bytes of a sequence."""
    lr: float = 1e-3
    text: Path | None = None
    """Training text, as a file or WikiText-2's folder; None is the source of Python's standard library."""
    seeds: int = 1
    """Repetitions of every run, each with its own weights, batches and request arrivals."""
    first_seed: int = 0
    request_timeout_s: float = 5.0
    """Seconds after which a request counts as failed."""
    timeout_s: float = 3600.0
    """Seconds after which the benchmark times out."""

    def __post_init__(self) -> None:
        check_between("ranks", self.ranks, 2, 64)
        check_subset("train", self.train, TRAININGS)
        _check_different("prefer", self.prefer)
        check_subset("yield_to", (self.yield_to,), get_args(YieldTo))
        _check_different("requests", self.requests)
        for rate in self.requests:
            check_between("requests", rate, 0.1, 1e5)
        check_between("size", self.size, 1, 1 << 30)
        check_between("seconds", self.seconds, 1.0, 1e5)
        check_between("steps", self.steps, 1, 1_000_000)
        check_between("slack", self.slack, 0.1, 100.0)
        if self.deadline_s is not None:
            check_between("deadline", self.deadline_s, 1e-3, 100.0)
        if self.allowed_loss is not None:
            check_between("allowed_loss", self.allowed_loss, 0.001, 0.9)
            if self.deadline_s is not None:
                raise BadSetting("allowed_loss", "lets the training learn its deadlines: leave out --deadline")
        check_between("at_latency", self.at_latency_s, 1e-6, 1e3)
        check_between("batch", self.batch, 1, 10_000)
        check_between("context", self.context, 1, 10_000)
        check_between("lr", self.lr, 1e-9, 10)
        check_between("seeds", self.seeds, 1, 1000)
        check_between("first_seed", self.first_seed, 0, 2**31)
        check_between("request_timeout", self.request_timeout_s, 0.01, 1e4)
        check_between("timeout_s", self.timeout_s, 10, 1e6)
        if self.network.rate is None:
            raise BadSetting("rate", "must be a rate: packets never queue on a link without a limit")
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
        """Calls of `STEPS_PER_CALL` steps until the training is evaluated."""
        return -(-self.steps // STEPS_PER_CALL)

    @property
    def limit_s(self) -> float:
        """Seconds after which a run ends, even if its training has not made its steps."""
        return max(4.0 * self.seconds, self.seconds + 60.0)

    def cases(self) -> list["Case"]:
        """All runs, in order: first each training alone, exact and then with deadlines; then the other cases for each
        rate, in an order that rotates.
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
        """Preferences that apply to a training: one at normal priority is not affected by the share of low priority."""
        if train in (NONE, DDP):
            return (None,)
        # At equal priority, ddp-low is ddp.
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
    comes from ranks that wait for processors."""
    low_share: float | None = None
    """Share of a link that the training keeps while the service could use all of it; None treats all packets alike."""

    @property
    def prefer(self) -> str:
        """The preference as text, as on the command line."""
        return "equal" if self.low_share is None else f"{self.low_share:g}"

    def __str__(self) -> str:
        if not self.requests:
            return f"{self.train} alone{'' if self.requests is None else ' with deadlines'}"
        return f"{self.train}, {self.prefer}, {self.requests:g} requests/s"

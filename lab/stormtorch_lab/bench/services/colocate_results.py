"""Results of `bench colocate`: single runs, their summary, and the requests carried at a fixed latency."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stormtorch.checks import blaming
from stormtorch.telemetry.json_files import without_nan, write_json
from stormtorch.telemetry.statistics import mean
from stormtorch_lab.bench.services.colocate import DDP, DDP_LOW, NONE, TRAININGS, Case, ColocateSettings
from stormtorch_lab.bench.services.service import ServiceResult
from stormtorch_lab.jobs.surroundings import surroundings
from stormtorch_lab.tasks.data.corpus import open_corpus

SERVICE = (
    "nginx on every host; requests from every host to every other, a Poisson process on each host, sent when they are "
    "due without waiting for earlier ones (open loop); latency from the due time to the last byte, with the client's "
    "own delay included; failed requests have no latency and are counted"
)
TRAINING = (
    "one rank on each host, one torch thread; AdamW at a constant learning rate, betas 0.9 and 0.95; each stage of an "
    "exchange ends at its deadline with the chunks received by then, without retransmission (ddp: all arrive); lead "
    "has neither standby nor guard; loss: fraction of the chunks that did not arrive while the service was measured"
)
ALONE = (
    "the same training without the service, without deadline and without loss (same weights, batches and steps); then "
    "with deadlines: that loss comes from ranks that wait for processors"
)


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
    """Fraction of the chunks that did not arrive, mean over both stages; None without a measured step."""
    loss_up: float | None
    """Fraction of the chunks of stage 1, to owners, that did not arrive."""
    loss_down: float | None
    """Fraction of the chunks of stage 2, from owners, that did not arrive."""
    bytes_per_step: float | None
    """Bytes of datagrams that a rank sends per step; None under DDP."""
    deadline_s: float | None
    """Deadline of each stage; None if there is none, or if the training learns it from `allowed_loss`."""
    exchange_s: float | None
    """Median over steps of the longest time that a rank waits for both stages; None under DDP."""
    validation: float | None
    """Validation loss after the fixed number of steps; None if they were not made in time."""
    last_validation: float | None
    """Validation loss at the end of the run, after all `steps`."""
    validation_ratio: float | None = None
    """`validation` divided by that of the training alone."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """Result of one run."""

    case: Case
    seconds: float
    """Seconds for which the training was measured; requests due in the first part of them are measured."""
    service: ServiceResult | None
    training: TrainingResult | None
    line_use: float | None
    """Utilisation of the hosts' uplinks by all bytes, mean over hosts; None without a training."""
    low_share: float | None
    """Share of low priority in the lab's conditions; None treats all packets alike."""
    drops: dict[str, Any]
    """Packets that passed the access links, and packets that found a queue full; in all and of low priority."""


@dataclass(frozen=True, kw_only=True)
class CaseSummary:
    """Means over the runs of one case, which differ only in their seeds."""

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
    """Speed-up: mean latency beside the same training at equal priority, divided by this one."""
    slowdown: float | None
    """Mean latency divided by that of the service alone."""

    @property
    def prefer(self) -> str:
        """The preference as text, as on the command line."""
        return "equal" if self.low_share is None else f"{self.low_share:g}"


@dataclass(frozen=True, kw_only=True)
class Carried:
    """Carried requests per second at a fixed mean latency."""

    train: str
    low_share: float | None
    per_s: float
    bound: str
    """"": between two rates that were measured; "at least": all of them were faster; "below": all were slower."""


@dataclass(frozen=True)
class ColocateReport:
    """Results with the conditions of their measurement; runs are added one by one."""

    conditions: dict[str, Any]
    runs: list[RunResult] = field(default_factory=list)

    @classmethod
    def begin(cls, settings: ColocateSettings) -> "ColocateReport":
        """Makes a report without any run.

        Raises:
            stormtorch.checks.BadSetting: There is no training data.
        """
        asked = asdict(settings) | {"network": settings.network.to_json(), "text": str(settings.text or "")}
        with blaming("data", "text"):
            corpus = open_corpus(settings.text).to_json()
        texts = {"service": SERVICE, "training": TRAINING, "alone": ALONE}
        return cls(surroundings() | {"settings": asked, "corpus": corpus} | texts)

    def rows(self) -> list[CaseSummary]:
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
        """For each training: seconds of a step alone, the deadline of a stage, and the loss with that deadline but
        without the service, which the network did not cause.
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
        """For each training and preference, the request rate at the given mean latency, by linear interpolation."""
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
        """Writes JSON and creates missing folders."""
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
    """Mean latency beside the same training at equal priority; for ddp-low that is ddp."""
    train, _, requests = key
    found = means.get((train, None, requests))
    return means.get((DDP, None, requests)) if found is None and train == DDP_LOW else found


def _order(key: _Key) -> tuple[int, float, float]:
    train, share, requests = key
    return -TRAININGS.index(train), -1.0 if share is None else 1.0 - share, requests


def _row(key: _Key, runs: Sequence[RunResult], equal_s: float | None, none_s: float | None) -> CaseSummary:
    train, share, requests = key
    services = [run.service for run in runs if run.service is not None]
    trainings = [run.training for run in runs if run.training is not None]
    mean_s = _mean([each.mean_s for each in services])
    return CaseSummary(
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
    """Mean of the values; None if any is None, or without values."""
    known = [value for value in values if value is not None]
    return mean(known) if known and len(known) == len(values) else None


def _run_json(run: RunResult) -> dict[str, Any]:
    service = None if run.service is None else run.service.to_json()
    return asdict(run) | {"case": asdict(run.case) | {"prefer": run.case.prefer}, "service": service}

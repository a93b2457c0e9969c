"""Results of studies: one for each policy and seed, and the report of all of them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from stormtorch.telemetry.json_files import without_nan, write_json
from stormtorch.telemetry.statistics import mean
from stormtorch_lab.studies.settings import SimSettings, StudySettings, TrainSettings


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """Result of one training: a policy and a seed."""

    policy: str
    """Label of the policy."""
    seed: int
    loss: float
    """Mean training loss over the ranks and the last tenth of the steps."""
    val_loss: float
    """Validation loss after the last step."""
    perplexity: float | None
    """Validation perplexity; None for images."""
    accuracy: float | None
    """Validation accuracy; None for a language model."""
    step_s: float
    """Median time of a step, by the slowest rank."""
    drift: float
    """Mean squared difference per parameter between two replicas after the last step; 0 is bit-identical."""
    arrived: float
    """Fraction of the chunks that arrived, mean over ranks and steps."""
    loss_measured: float | None
    """Fraction of the datagrams that fault injection dropped; None without fault injection."""
    curve: list[tuple[int, float]]
    """Step and training loss, mean over the ranks."""
    val_curve: list[tuple[int, float, float]]
    """Step, seconds of training until then, validation loss."""


@dataclass(frozen=True, kw_only=True)
class SimResult(TrainResult):
    """Result of one simulated training: a policy and a seed."""

    workers: int
    lag: dict[int, float]
    """Distribution of the age of all copies after the last step: fraction by age in steps."""
    drift_curve: list[tuple[int, float | None, float | None, float | None]]
    """Step, mean squared difference between two replicas, between replica and owner, and mean square of one update."""
    lead: float
    """Mean lead over owners and steps, in updates."""
    broadcast_lost: float
    """Fraction of the broadcast's chunks that was lost, after any repair."""
    fetched: int
    """Chunks fetched exactly, as they would have become too old."""
    how: str
    at_once: int
    peak_bytes: int | None
    """Peak GPU memory; None on the CPU."""
    guarded: int = 0
    """Steps in which the guard repaired the broadcast."""
    bytes_sent: float = 0.0
    """Bytes that a worker sends per step, mean over workers and steps. Retransmissions count under a budget; in an
    exact stage every chunk counts once."""
    parity_bytes: float = 0.0
    """Bytes of parity among them."""
    recovered: float = 0.0
    """Chunks of all workers recovered by parity per step, mean over steps."""

    @property
    def mean_lag(self) -> float | None:
        """Mean age of all copies after the last step, in steps; None if each worker trains its own model."""
        return sum(age * share for age, share in self.lag.items()) if self.lag else None

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> SimResult:
        """Reads plain data: JSON has neither tuples nor numeric keys."""
        curves = {name: [tuple(each) for each in data[name]] for name in ("curve", "val_curve", "drift_curve")}
        return cls(**data | curves | {"lag": {int(age): share for age, share in data["lag"].items()}})


SettingsT = TypeVar("SettingsT", bound=StudySettings)
ResultT = TypeVar("ResultT", bound=TrainResult)


@dataclass(frozen=True)
class StudyReport(Generic[SettingsT, ResultT]):
    """Results of a study with the conditions of their measurement."""

    settings: SettingsT
    requested: dict[str, Any]
    """Settings as plain data, with the data and the size of the model."""
    measured: dict[str, Any]
    """Measured loss and drops of the network."""
    conditions: dict[str, Any]
    """Machine, versions, commit and date."""
    results: list[ResultT]
    """Results in the order of the trainings."""

    @property
    def language(self) -> bool:
        """Whether the trained model was a language model."""
        return self.results[0].perplexity is not None

    def of(self, policy: str) -> list[ResultT]:
        """Results of one policy, by its label and in the order of seeds."""
        return [result for result in self.results if result.policy == policy]

    def against_lossless(self, policy: str) -> list[float] | None:
        """By how much perplexity (relatively) or accuracy (absolutely) is above that of lossless, for each seed; None
        without lossless.
        """
        lossless = self.of("lossless")
        return [_above(own, other) for own, other in zip(self.of(policy), lossless, strict=True)] if lossless else None

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        found: dict[str, Any] = without_nan(
            {
                "settings": self.requested,
                "measured": self.measured,
                "conditions": self.conditions,
                "results": [asdict(result) for result in self.results],
            }
        )
        return found

    def write(self, path: Path) -> None:
        """Writes JSON and creates missing folders."""
        write_json(path, self.to_json())


@dataclass(frozen=True)
class TrainReport(StudyReport[TrainSettings, TrainResult]):
    """Report of `stormtorch train`."""


@dataclass(frozen=True)
class SimReport(StudyReport[SimSettings, SimResult]):
    """Report of `stormtorch simulate`."""


def lost_on_average(results: list[SimResult]) -> float:
    """Mean fraction of the chunks that was lost, over the trainings that allow loss."""
    lost = [1.0 - result.arrived for result in results if result.policy != "lossless"]
    return mean(lost) if lost else 0.0


def exp_of(value: float) -> float:
    """Perplexity of a loss; inf on overflow."""
    return math.exp(value) if value < 700 else math.inf


def _above(own: TrainResult, other: TrainResult) -> float:
    if own.accuracy is not None and other.accuracy is not None:
        return own.accuracy - other.accuracy
    assert own.perplexity is not None and other.perplexity is not None
    return own.perplexity / other.perplexity - 1

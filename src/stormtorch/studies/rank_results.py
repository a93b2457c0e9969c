"""What trainings found out: one result per policy and seed, and the report of all of them."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from stormtorch.results.report import without_nan, write_json
from stormtorch.studies.rank_settings import TrainSettings


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """One training: a policy and a seed."""

    policy: str
    seed: int
    loss: float
    """Mean training loss over the ranks and the last tenth of the steps."""
    val_loss: float
    """After the last step, on what is held out."""
    perplexity: float | None
    """Of that; None for pictures."""
    accuracy: float | None
    """Fraction of pictures told right; None for a language model."""
    step_s: float
    """Median of the steps; a step is as long as its slowest rank takes."""
    drift: float
    """Mean squared difference per parameter between two replicas after the last step; 0 is bit for bit."""
    arrived: float
    """Fraction of the chunks, mean over ranks and steps."""
    loss_measured: float | None
    """Fraction of the datagrams that fault injection lost; None where it has no hands in."""
    curve: list[tuple[int, float]]
    """Step and training loss, mean over the ranks."""
    val_curve: list[tuple[int, float, float]]
    """Step, seconds of training until then, validation loss."""


SettingsT = TypeVar("SettingsT")
ResultT = TypeVar("ResultT", bound=TrainResult)


@dataclass(frozen=True)
class Report(Generic[SettingsT, ResultT]):
    """What came out, under which conditions."""

    settings: SettingsT
    asked: dict[str, Any]
    """The settings as plain data, with the data and the size of the model."""
    measured: dict[str, Any]
    """What the network did."""
    conditions: dict[str, Any]
    """Machine, versions, commit and date."""
    results: list[ResultT]
    """In the order of the trainings."""

    @property
    def language(self) -> bool:
        """Whether it was a language model."""
        return self.results[0].perplexity is not None

    def of(self, policy: str) -> list[ResultT]:
        """One policy's, by seed."""
        return [result for result in self.results if result.policy == policy]

    def against_lossless(self, policy: str) -> list[float] | None:
        """Of each seed, how much perplexity is above that of lossless, relatively, or accuracy, absolutely; None
        without lossless.
        """
        lossless = self.of("lossless")
        return [_above(own, other) for own, other in zip(self.of(policy), lossless, strict=True)] if lossless else None

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        found: dict[str, Any] = without_nan(
            {
                "settings": self.asked,
                "measured": self.measured,
                "conditions": self.conditions,
                "results": [asdict(result) for result in self.results],
            }
        )
        return found

    def write(self, path: Path) -> None:
        """As JSON; makes missing folders."""
        write_json(path, self.to_json())


@dataclass(frozen=True)
class TrainReport(Report[TrainSettings, TrainResult]):
    """Of `stormtorch train`."""


def _above(own: TrainResult, other: TrainResult) -> float:
    if own.accuracy is not None and other.accuracy is not None:
        return own.accuracy - other.accuracy
    assert own.perplexity is not None and other.perplexity is not None
    return own.perplexity / other.perplexity - 1


def exp_of(value: float) -> float:
    """The perplexity of a loss."""
    return math.exp(value) if value < 700 else math.inf

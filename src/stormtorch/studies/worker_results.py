"""What simulated trainings found out, in the form of `stormtorch train`'s."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from stormtorch.policies.ledger import Row
from stormtorch.results.statistics import mean, median
from stormtorch.simulation.run import Simulated
from stormtorch.studies.rank_results import Report, TrainResult, exp_of
from stormtorch.studies.worker_settings import SimSettings

# Of the ledger, so many rows are kept in a result.
_ROWS = 100


@dataclass(frozen=True, kw_only=True)
class SimResult(TrainResult):
    """One simulated training: a policy and a seed."""

    workers: int
    lag: dict[int, float]
    """What fraction of all copies is so many steps old after the last step."""
    drift_curve: list[tuple[int, float | None, float | None, float | None]]
    """Step, mean squared difference between two replicas, between replica and owner, and mean square of one update."""
    lead: float
    """Mean over owners and steps, in updates."""
    broadcast_lost: float
    """Fraction of the broadcast's chunks, after any repair."""
    fetched: int
    """Chunks that would have become too old."""
    how: str
    at_once: int
    peak_bytes: int | None
    """Memory of the GPU, at most."""
    guarded: int = 0
    """Steps in which the guard had the broadcast repaired."""

    @property
    def mean_lag(self) -> float | None:
        """Of all copies, in steps, after the last step; None where workers have models of their own."""
        return sum(age * share for age, share in self.lag.items()) if self.lag else None

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> SimResult:
        """From plain data: JSON knows neither tuples nor numbers as keys."""
        curves = {name: [tuple(each) for each in data[name]] for name in ("curve", "val_curve", "drift_curve")}
        return cls(**data | curves | {"lag": {int(age): share for age, share in data["lag"].items()}})


@dataclass(frozen=True)
class SimReport(Report[SimSettings, SimResult]):
    """Of `stormtorch simulate`."""


def lost_on_average(results: list[SimResult]) -> float:
    """Fraction of the chunks, over the trainings in which any may be lost."""
    lost = [1.0 - result.arrived for result in results if result.policy != "lossless"]
    return mean(lost) if lost else 0.0


def result_of(done: Simulated, *, policy: str, seed: int, workers: int, language: bool) -> SimResult:
    """Of one training."""
    losses = [loss for _, loss in done.curve]
    rows = list(done.ledger)
    _, val_loss, accuracy = done.validations[-1]
    # Where models are averaged less often than there are steps, there is no row.
    lag = rows[-1].lag if rows else {}
    copies = sum(lag.values())
    down = [mean(list(row.broadcast.values())) for row in rows if row.broadcast]
    return SimResult(
        policy=policy,
        seed=seed,
        loss=mean(losses[-max(len(losses) // 10, 1) :]),
        val_loss=val_loss,
        perplexity=exp_of(val_loss) if language else None,
        accuracy=None if language else accuracy,
        step_s=median(done.times_s),
        drift=done.drift,
        arrived=mean([row.arrived for row in rows if row.gradients]) if any(row.gradients for row in rows) else 1.0,
        loss_measured=None,
        curve=[(step, round(loss, 5)) for step, loss in done.curve],
        val_curve=[(step, round(sum(done.times_s[:step]), 3), round(loss, 5)) for step, loss, _ in done.validations],
        workers=workers,
        lag={age: count / copies for age, count in lag.items()},
        drift_curve=[_drifts(row) for row in rows[:: max(len(rows) // _ROWS, 1)]],
        lead=mean([row.lead for row in rows]) if rows else 0.0,
        broadcast_lost=1.0 - mean(down) if down else 0.0,
        fetched=sum(row.fetched for row in rows),
        how=done.how,
        at_once=done.at_once,
        peak_bytes=done.peak_bytes,
        guarded=sum(row.guarded for row in rows),
    )


def _drifts(row: Row) -> tuple[int, float | None, float | None, float | None]:
    return row.step + 1, row.pair_drift, row.owner_drift, row.update_variance

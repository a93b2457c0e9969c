"""Simulates what settings ask for: each policy and seed once, and reports as `stormtorch train` does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from stormtorch.bench.conditions import surroundings, write_json
from stormtorch.bench.display import Advance, ignore_progress
from stormtorch.bench.samples import median
from stormtorch.policies.ledger import Row
from stormtorch.simulation.run import Simulated, Spot, simulate
from stormtorch.simulation.setting import MakeOptimizer, Reuse
from stormtorch.simulation.settings import SimSettings
from stormtorch.simulation.tasks import Task, open_task
from stormtorch.training.results import TrainResult, exp_of, without_nan

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


@dataclass(frozen=True)
class SimReport:
    """What came out, under which conditions."""

    settings: SimSettings
    asked: dict[str, Any]
    conditions: dict[str, Any]
    results: list[SimResult]

    @property
    def language(self) -> bool:
        """Whether it was a language model."""
        return self.results[0].perplexity is not None

    def of(self, policy: str) -> list[SimResult]:
        """One policy's, by seed."""
        return [result for result in self.results if result.policy == policy]

    def to_json(self) -> dict[str, Any]:
        """Plain data, as of `stormtorch train`."""
        lost = [1.0 - result.arrived for result in self.results if result.policy != "lossless"]
        measured = {"loss": sum(lost) / len(lost) if lost else 0.0}
        found: dict[str, Any] = without_nan(
            {
                "settings": self.asked,
                "measured": measured,
                "conditions": self.conditions,
                "results": [asdict(result) for result in self.results],
            }
        )
        return found

    def write(self, path: Path) -> None:
        """As JSON; makes missing folders."""
        write_json(path, self.to_json())


def task_of(settings: SimSettings) -> Task:
    """What these settings learn; reads its data.

    Raises:
        BadSetting: The data cannot be read, or a setting is not one of this model's.
    """
    return open_task(
        settings.model,
        settings.data,
        batch=settings.batch,
        device=torch.device(settings.device),
        lr=settings.lr,
        context=settings.context,
        width=settings.width,
        layers=settings.layers,
        held_out=settings.held_out,
    )


def run_simulations(
    settings: SimSettings, advance: Advance = ignore_progress, checkpoints: Path | None = None
) -> SimReport:
    """Simulates one training after the other.

    Args:
        settings: What.
        advance: Told of every step.
        checkpoints: A folder for their states and results: what is there already is not computed again.

    Raises:
        BadSetting: The data cannot be read, or a setting is not one of this model's.
    """
    task = task_of(settings)
    params = sum(parameter.numel() for parameter in task.model(0).parameters())
    asked = settings.to_json() | {"data": task.to_json(), "params": params}
    results = []
    reuse = Reuse()
    for number, (seed, policy) in enumerate(settings.trainings):

        def tell(spot: Spot, number: int = number, policy: str = policy, seed: int = seed) -> None:
            advance(f"{policy}, seed {seed}: loss {spot.loss:.2f}", number * settings.steps + spot.step)

        place = None if checkpoints is None else checkpoints / f"{policy}-{seed}.pt"
        results.append(simulate_one(settings, task, policy, seed, tell, place, reuse))
    return SimReport(settings, asked, surroundings(), results)


def simulate_one(
    settings: SimSettings,
    task: Task,
    policy: str,
    seed: int,
    advance: Callable[[Spot], None] | None = None,
    checkpoint: Path | None = None,
    reuse: Reuse | None = None,
) -> SimResult:
    """One training."""
    done = simulate(
        task.model(seed),
        task.loss,
        lambda step, first, last: task.batches(seed, step, settings.workers, first, last),
        _optimizer(settings, task),
        workers=settings.workers,
        steps=settings.steps,
        network=settings.loss_model(),
        policy=settings.policy_of(policy),
        seed=seed,
        rate=lambda step: task.rate(step, settings.steps),
        clip=task.clip,
        evaluate=task.evaluate,
        device=settings.device,
        how=settings.how,
        at_once=settings.at_once,
        precision=settings.precision,
        fuse=settings.fuse,
        checkpoint=checkpoint,
        advance=advance,
        reuse=reuse,
    )
    return _result(done, task, policy, seed, settings.workers)


def _optimizer(settings: SimSettings, task: Task) -> MakeOptimizer:
    lr = settings.lr or task.lr
    if settings.optimizer == "adamw":
        return lambda parameters: torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    if settings.optimizer in ("momentum", "sgd"):
        momentum = 0.9 if settings.optimizer == "momentum" else 0.0
        return lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=momentum)
    return task.optimizer


def _result(done: Simulated, task: Task, policy: str, seed: int, workers: int) -> SimResult:
    losses = [loss for _, loss in done.curve]
    rows = list(done.ledger)
    _, val_loss, accuracy = done.validations[-1]
    copies = sum(rows[-1].lag.values())
    down = [_mean(list(row.broadcast.values())) for row in rows if row.broadcast]
    return SimResult(
        policy=policy,
        seed=seed,
        loss=_mean(losses[-max(len(losses) // 10, 1) :]),
        val_loss=val_loss,
        perplexity=exp_of(val_loss) if task.language else None,
        accuracy=None if task.language else accuracy,
        step_s=median(done.times_s),
        drift=done.drift,
        arrived=float(done.ledger.summary()["arrived"]),
        loss_measured=None,
        curve=[(step, round(loss, 5)) for step, loss in done.curve],
        val_curve=[(step, round(sum(done.times_s[:step]), 3), round(loss, 5)) for step, loss, _ in done.validations],
        workers=workers,
        lag={age: count / copies for age, count in rows[-1].lag.items()},
        drift_curve=[_drifts(row) for row in rows[:: max(len(rows) // _ROWS, 1)]],
        lead=_mean([row.lead for row in rows]),
        broadcast_lost=1.0 - _mean(down) if down else 0.0,
        fetched=sum(row.fetched for row in rows),
        how=done.how,
        at_once=done.at_once,
        peak_bytes=done.peak_bytes,
    )


def _drifts(row: Row) -> tuple[int, float | None, float | None, float | None]:
    return row.step + 1, row.pair_drift, row.owner_drift, row.update_variance


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)

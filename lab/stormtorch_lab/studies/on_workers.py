"""Trainings on virtual workers: one for each policy and seed, reported as trainings on ranks are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from stormtorch.checks import BadSetting
from stormtorch.telemetry.ledger import LedgerRow
from stormtorch.telemetry.progress import Advance, ignore_progress
from stormtorch.telemetry.statistics import mean, median
from stormtorch_lab.jobs.surroundings import surroundings
from stormtorch_lab.simulation.checkpoints import digest
from stormtorch_lab.simulation.processes import Processes
from stormtorch_lab.simulation.run import ProgressPoint, Simulated, simulate
from stormtorch_lab.simulation.setting import MakeOptimizer, Reuse
from stormtorch_lab.studies.finished import Finished
from stormtorch_lab.studies.results import SimReport, SimResult, exp_of, lost_on_average
from stormtorch_lab.studies.settings import SimSettings, named
from stormtorch_lab.tasks.kinds import open_task
from stormtorch_lab.tasks.task import Task, adamw

_SMALL_PARAMS = 1_000_000
# Rows of the ledger that a result keeps, about.
_ROWS = 100


def task_of(settings: SimSettings) -> Task:
    """Reads the data, and makes the task.

    Raises:
        BadSetting: The data cannot be read, or this model has no such setting.
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
    settings: SimSettings,
    advance: Advance = ignore_progress,
    checkpoints: Path | None = None,
    ledger: Path | None = None,
) -> SimReport:
    """Simulates one training after the other. Processes of torchrun share the workers; all get the same report.

    Args:
        settings: Settings of all trainings.
        advance: Called after every step.
        checkpoints: Folder for checkpoints and results: results in it are not computed again.
        ledger: File for a line of JSON for every step of every training, the latest 10,000 of each.

    Raises:
        BadSetting: The data cannot be read, a setting is not one of this model's, or the checkpoints are of other
            settings.
        KeyboardInterrupt: Ctrl-C; with checkpoints, the same call resumes.
    """
    task = task_of(settings)
    together = Processes()
    if settings.workers < together.world:
        raise BadSetting("workers", f"must be at least the {together.world} processes, got {settings.workers}")
    params = sum(parameter.numel() for parameter in task.model(0).parameters())
    requested = settings.to_json() | {"data": task.to_json(), "params": params}
    conditions = surroundings()
    if settings.device.startswith("cuda"):
        conditions["machine"]["gpu"] = torch.cuda.get_device_name(settings.device)
    finished = Finished(checkpoints, ledger, together, requested | {"network_digest": digest(settings.loss_model())})
    results = []
    reuse = Reuse()
    for number, (seed, label) in enumerate(settings.trainings):

        def on_progress(spot: ProgressPoint, number: int = number, label: str = label, seed: int = seed) -> None:
            advance(f"{label}, seed {seed}: loss {spot.loss:.2f}", number * settings.steps + spot.step)

        key = f"{settings.key_of(label)}-{seed}"
        result = finished.find(key)
        if result is None:
            checkpoint_path = None if checkpoints is None else checkpoints / f"{key}.pt"
            try:
                with _threads(settings, task, params):
                    done = _simulate(settings, task, label, seed, on_progress, checkpoint_path, reuse)
            except ValueError as error:
                raise named(error) from error
            result = result_of(done, policy=label, seed=seed, workers=settings.workers, language=task.language)
            finished.keep(key, result, done.ledger)
        results.append(result)
    return SimReport(settings, requested, {"loss": lost_on_average(results)}, conditions, results)


def result_of(done: Simulated, *, policy: str, seed: int, workers: int, language: bool) -> SimResult:
    """Makes the result of one training."""
    losses = [loss for _, loss in done.curve]
    rows = list(done.ledger)
    _, val_loss, accuracy = done.validations[-1]
    # A step without an exchange of models has no row.
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
        bytes_sent=mean([row.bytes_sent for row in rows]) if rows else 0.0,
        parity_bytes=mean([row.parity_bytes for row in rows]) if rows else 0.0,
        recovered=mean([row.recovered for row in rows]) if rows else 0.0,
    )


def _drifts(row: LedgerRow) -> tuple[int, float | None, float | None, float | None]:
    return row.step + 1, row.pair_drift, row.owner_drift, row.update_variance


@contextlib.contextmanager
def _threads(settings: SimSettings, task: Task, params: int) -> Iterator[None]:
    """Uses one thread for small language models on the CPU: more threads gain nothing, and are slow on shared cores.
    Only the size decides, as the number of threads changes the last bits of sums.
    """
    before = torch.get_num_threads()
    if settings.device == "cpu" and task.language and params < _SMALL_PARAMS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def simulate_one(
    settings: SimSettings,
    task: Task,
    policy: str,
    seed: int,
    advance: Callable[[ProgressPoint], None] | None = None,
    checkpoint: Path | None = None,
    reuse: Reuse | None = None,
) -> SimResult:
    """Simulates one training: a policy, by its label, and a seed."""
    done = _simulate(settings, task, policy, seed, advance, checkpoint, reuse)
    return result_of(done, policy=policy, seed=seed, workers=settings.workers, language=task.language)


def _simulate(
    settings: SimSettings,
    task: Task,
    policy: str,
    seed: int,
    advance: Callable[[ProgressPoint], None] | None,
    checkpoint: Path | None,
    reuse: Reuse | None,
) -> Simulated:
    return simulate(
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
        deterministic=settings.deterministic,
        checkpoint=checkpoint,
        advance=advance,
        reuse=reuse,
    )


def _optimizer(settings: SimSettings, task: Task) -> MakeOptimizer:
    lr = settings.lr or task.lr
    if settings.optimizer == "adamw":
        return lambda parameters: adamw(parameters, lr)
    if settings.optimizer == "nadam":
        # AdamW with Nesterov's look-ahead, and its decay of weights.
        return lambda parameters: torch.optim.NAdam(
            parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.1, decoupled_weight_decay=True
        )
    if settings.optimizer in ("momentum", "sgd"):
        momentum = 0.9 if settings.optimizer == "momentum" else 0.0
        return lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=momentum)
    return task.optimizer

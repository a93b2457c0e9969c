"""Simulates what settings ask for: each policy and seed once, and reports as `stormtorch train` does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from stormtorch.checks import BadSetting
from stormtorch.results.progress import Advance, ignore_progress
from stormtorch.results.surroundings import surroundings
from stormtorch.simulation.checkpoints import digest
from stormtorch.simulation.processes import Together
from stormtorch.simulation.run import Simulated, Spot, simulate
from stormtorch.simulation.setting import MakeOptimizer, Reuse
from stormtorch.studies.finished import Finished
from stormtorch.studies.worker_results import SimReport, SimResult, lost_on_average, result_of
from stormtorch.studies.worker_settings import SimSettings
from stormtorch.tasks.batches import adamw
from stormtorch.tasks.kinds import Task, open_task

__all__ = ["SimReport", "SimResult", "run_simulations", "simulate_one", "task_of"]

_SMALL_PARAMS = 1_000_000


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
    settings: SimSettings,
    advance: Advance = ignore_progress,
    checkpoints: Path | None = None,
    ledger: Path | None = None,
) -> SimReport:
    """Simulates one training after the other. Processes of torchrun share the workers; all get the same report.

    Args:
        settings: What.
        advance: Told of every step.
        checkpoints: A folder for their states and results: what is there already is not computed again.
        ledger: Gets a line of JSON for every step of every training, the latest 10,000 of each.

    Raises:
        BadSetting: The data cannot be read, a setting is not one of this model's, or the checkpoints are of other
            settings.
        KeyboardInterrupt: Ctrl-C; with checkpoints, the same call goes on where it was.
    """
    task = task_of(settings)
    together = Together()
    if settings.workers < together.world:
        raise BadSetting("workers", f"must be at least the {together.world} processes, got {settings.workers}")
    params = sum(parameter.numel() for parameter in task.model(0).parameters())
    asked = settings.to_json() | {"data": task.to_json(), "params": params}
    conditions = surroundings()
    if settings.device.startswith("cuda"):
        conditions["machine"]["gpu"] = torch.cuda.get_device_name(settings.device)
    finished = Finished(checkpoints, ledger, together, asked | {"network_digest": digest(settings.loss_model())})
    results = []
    reuse = Reuse()
    for number, (seed, policy) in enumerate(settings.trainings):

        def tell(spot: Spot, number: int = number, policy: str = policy, seed: int = seed) -> None:
            advance(f"{policy}, seed {seed}: loss {spot.loss:.2f}", number * settings.steps + spot.step)

        result = finished.find(policy, seed)
        if result is None:
            place = None if checkpoints is None else checkpoints / f"{policy}-{seed}.pt"
            try:
                with _threads(settings, task, params):
                    done = _simulate(settings, task, policy, seed, tell, place, reuse)
            except ValueError as error:
                raise _named(error) from error
            result = result_of(done, policy=policy, seed=seed, workers=settings.workers, language=task.language)
            finished.keep(result, done.ledger)
        results.append(result)
    return SimReport(settings, asked, {"loss": lost_on_average(results)}, conditions, results)


@contextlib.contextmanager
def _threads(settings: SimSettings, task: Task, params: int) -> Iterator[None]:
    """On the CPU, one thread for small language models: more gain nothing, and where cores are shared they lose much
    by waiting for each other. By size alone, as the number of threads changes the last bits of sums.
    """
    before = torch.get_num_threads()
    if settings.device == "cpu" and task.language and params < _SMALL_PARAMS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _named(error: ValueError) -> ValueError:
    """With the option that it speaks of, where that is one."""
    knob, _, problem = str(error).partition(" ")
    return BadSetting(knob, problem) if knob in ("checkpoint", "budget") else error


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
    done = _simulate(settings, task, policy, seed, advance, checkpoint, reuse)
    return result_of(done, policy=policy, seed=seed, workers=settings.workers, language=task.language)


def _simulate(
    settings: SimSettings,
    task: Task,
    policy: str,
    seed: int,
    advance: Callable[[Spot], None] | None,
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

"""Trains a model once for each policy and seed, on ranks of their own, over UDP that loses."""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from stormtorch.collectives import Group, Op, all_reduce, broadcast
from stormtorch.jobs.control import Contender, Cue, Stage
from stormtorch.jobs.counters import Counters
from stormtorch.jobs.places import open_lab, run_here, run_in_lab
from stormtorch.jobs.ranks import Member
from stormtorch.network.faults import faults
from stormtorch.policies import BoundedDrift, GradientAveraging, ModelAveraging
from stormtorch.reliability import EXACT, Reliability
from stormtorch.results.progress import Advance, ignore_progress
from stormtorch.results.statistics import mean, median
from stormtorch.results.surroundings import surroundings
from stormtorch.runtime.norms import clip_grad_norm_
from stormtorch.runtime.prepare import exact, prepare
from stormtorch.studies.rank_results import TrainReport, TrainResult, exp_of
from stormtorch.studies.rank_settings import TrainSettings
from stormtorch.tasks.batches import Task, loss_of, rate_at
from stormtorch.transport.options import Options
from stormtorch.transport.rendezvous import connect

# Ethernet's: loss then strikes chunks of the size that it would strike on a network.
_DATAGRAM_BYTES = 1472
_WIRES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}


@dataclass
class RankTraining:
    """What one rank saw of one training."""

    policy: str
    seed: int
    losses: list[float] = field(default_factory=list)
    """Of each step, on this rank's batch."""
    times_s: list[float] = field(default_factory=list)
    """Of each step."""
    validations: list[tuple[int, float, float]] = field(default_factory=list)
    """After how many steps, the loss and the fraction of right answers; over all ranks."""
    drift: float = 0.0
    """Over all ranks."""
    arrived: float = 1.0
    counters: Counters = field(default_factory=Counters)


def run_training(settings: TrainSettings, advance: Advance = ignore_progress) -> TrainReport:
    """Trains, and returns when all ranks are gone.

    Raises:
        stormtorch.checks.BadSetting: The data cannot be read.
        stormtorch.jobs.failed.RankFailed: A rank failed or did not end in time.
        stormtorch.lab.LabError: The lab failed, or none can be made here.
    """
    task = settings.open_task()
    params = sum(parameter.numel() for parameter in task.model(0).parameters())
    asked = settings.to_json() | {"data": task.to_json(), "params": params}
    conditions = surroundings()
    world, patience_s = settings.ranks, settings.timeout_s
    if settings.network is None:
        ranks, where = run_here(train_on_rank, world, (settings,), timeout_s=patience_s, advance=advance)
    else:
        with open_lab(world, settings.network, ()) as lab:
            ranks, where = run_in_lab(
                train_on_rank, lab, settings.network, world, (settings,), timeout_s=patience_s, advance=advance
            )
    counters = sum((training.counters for rank in ranks for training in rank), Counters())
    measured: dict[str, Any] = {
        "loss": where.pop("loss_measured", counters.loss),
        "kernel_drops": counters.kernel_drops,
    } | where
    results = [result_of(list(trainings), language=task.language) for trainings in zip(*ranks, strict=True)]
    return TrainReport(settings, asked, measured, conditions, results)


def result_of(trainings: Sequence[RankTraining], *, language: bool) -> TrainResult:
    """All ranks' view of one training."""
    first = trainings[0]
    losses = [mean(step) for step in zip(*(each.losses for each in trainings), strict=True)]
    times_s = [max(step) for step in zip(*(each.times_s for each in trainings), strict=True)]
    counters = sum((each.counters for each in trainings), Counters())
    _, val_loss, accuracy = first.validations[-1]
    return TrainResult(
        policy=first.policy,
        seed=first.seed,
        loss=mean(losses[-max(len(losses) // 10, 1) :]),
        val_loss=val_loss,
        perplexity=exp_of(val_loss) if language else None,
        accuracy=None if language else accuracy,
        step_s=median(times_s),
        drift=first.drift,
        arrived=mean([each.arrived for each in trainings]),
        loss_measured=counters.loss if counters.seen else None,
        curve=[(step + 1, round(loss, 5)) for step, loss in enumerate(losses)],
        val_curve=[(step, round(sum(times_s[:step]), 3), round(loss, 5)) for step, loss, _ in first.validations],
    )


def train_on_rank(member: Member, settings: TrainSettings) -> list[RankTraining]:
    """One rank's part of all trainings."""
    task = settings.open_task()
    found: list[RankTraining] = []
    stage: Stage[Contender]
    with Stage(member, (), lab=settings.network is not None) as stage:
        for number, (seed, policy) in enumerate(settings.trainings):
            # Not in a with statement: the goodbye of a rank that failed would make the others' errors hide its own.
            transport = connect(
                member.store,
                member.rank,
                member.world,
                Options(datagram_bytes=_DATAGRAM_BYTES, interface=member.interface),
                prefix=f"stormtorch/training/{number}",
            )
            if number == 0:
                stage.cue(Cue.LOSE)
                stage.cue(Cue.COUNT)
            with _faults(settings, seed):
                training = _train(stage, Group(transport), task, settings, RankTraining(policy, seed))
                training.counters = Counters.of(transport)
                stage.barrier()  # who is done first must not spare the others a part of the loss
            found.append(training)
            transport.close()
        stage.cue(Cue.READ)
    return found


def _faults(settings: TrainSettings, seed: int) -> contextlib.AbstractContextManager[object]:
    if settings.network is not None:
        return contextlib.nullcontext()
    return faults(loss=settings.loss, burst=settings.burst, seed=seed)


def policy_of(name: str, settings: TrainSettings) -> Any:
    """The library's policy of that name."""
    lossy = Reliability(budget=settings.budget)
    wire = _WIRES[settings.wire]
    if name == "model-averaging":
        return ModelAveraging(every=1, reliability=lossy)
    if name == "gradient-averaging":
        return GradientAveraging(reliability=lossy)
    if name == "lossless":
        return BoundedDrift(gradients=EXACT, broadcast=EXACT, wire=wire)
    return BoundedDrift(
        gradients=lossy, broadcast=lossy, lead=float(name == "lead"), max_lag=settings.max_lag, wire=wire
    )


def _train(
    stage: Stage[Contender], group: Group, task: Task, settings: TrainSettings, training: RankTraining
) -> RankTraining:
    model = task.model(training.seed)
    model, optimizer = prepare(model, task.optimizer(model), policy=policy_of(training.policy, settings), group=group)
    rank = stage.member.rank
    stage.barrier()
    for step in range(settings.steps):
        begin = time.perf_counter()
        inputs, targets = task.batch(training.seed, step, rank)
        for parameters in optimizer.param_groups:
            parameters["lr"] = rate_at(step, settings.steps, settings.lr)
        loss = loss_of(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        if task.clip is not None:
            clip_grad_norm_(model.parameters(), task.clip)
        optimizer.step()
        optimizer.zero_grad()
        training.losses.append(float(loss.detach()))
        training.times_s.append(time.perf_counter() - begin)
        done = step + 1
        if rank == 0:
            stage.member.tell(f"{training.policy}, seed {training.seed}: loss {training.losses[-1]:.2f}")
        if done == settings.steps:
            # Before anything makes the replicas equal again, but after the last parameters: forward waits for them.
            with torch.no_grad():
                model.eval()(inputs)
            training.drift = _drift(stage, group, model)
            training.arrived = float(optimizer.ledger.summary()["arrived"])  # type: ignore[attr-defined]  # given by prepare
        if done == settings.steps or done % settings.validate_every == 0:
            training.validations.append((done, *_validate(stage, model, task)))
    return training


def _drift(stage: Stage[Contender], group: Group, model: nn.Module) -> float:
    """Mean squared difference per parameter between two replicas, on average over all pairs of ranks."""
    own = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    first = own.clone()
    broadcast(group, first, 0).wait()
    # From rank 0's, so that equal replicas differ by nothing and not by the rounding of a mean.
    own -= first
    mean = own.clone()
    all_reduce(group, mean, Op.AVG).wait()
    spread = _mean_over_ranks(stage, [float((own - mean).double().square().mean())])[0]
    return 2 * group.size / (group.size - 1) * spread


def _validate(stage: Stage[Contender], model: nn.Module, task: Task) -> tuple[float, float]:
    """The loss and the fraction of right answers on what is held out, each rank judging its part of it."""
    total, right, count = 0.0, 0, 0
    model.eval()
    with exact(model), torch.inference_mode():
        for inputs, targets in task.validation(stage.member.rank):
            scores = model(inputs)
            total += float(loss_of(scores, targets)) * targets.numel()
            right += int((scores.argmax(-1) == targets).sum())
            count += targets.numel()
    model.train()
    all_total, all_right, all_count = _mean_over_ranks(stage, [total, right, count])
    return all_total / all_count, all_right / all_count


def _mean_over_ranks(stage: Stage[Contender], values: list[float]) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64)
    stage.control.allreduce([tensor]).wait()
    found: list[float] = (tensor / stage.member.world).tolist()
    return found

"""Trainings on ranks: one for each policy and seed, over UDP with loss."""

import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from stormtorch.collectives import Group, Op, all_reduce, broadcast
from stormtorch.exchange.options import Options
from stormtorch.joining.rendezvous import connect
from stormtorch.network.faults import faults
from stormtorch.policies.policy import Policy
from stormtorch.policies.rank_policy import RankPolicy
from stormtorch.runtime.memory.gradient_norms import clip_grad_norm_
from stormtorch.runtime.prepare import exact, prepare
from stormtorch.telemetry.progress import Advance, ignore_progress
from stormtorch.telemetry.statistics import mean, median
from stormtorch_lab.jobs.control import Contender, LabRequest, Stage
from stormtorch_lab.jobs.counters import Counters
from stormtorch_lab.jobs.launch import open_lab, run_in_lab, run_local
from stormtorch_lab.jobs.ranks import Member
from stormtorch_lab.jobs.surroundings import surroundings
from stormtorch_lab.studies.results import TrainReport, TrainResult, exp_of
from stormtorch_lab.studies.settings import TrainSettings
from stormtorch_lab.tasks.task import Task

# As on Ethernet, so that lost chunks have the size that they have on a network.
_DATAGRAM_BYTES = 1472
# Validations of a training.
_VALIDATIONS = 10


@dataclass
class RankTraining:
    """Record of one training on one rank."""

    policy: str
    """Label of the policy."""
    seed: int
    losses: list[float] = field(default_factory=list)
    """Loss of each step, on this rank's batch."""
    times_s: list[float] = field(default_factory=list)
    """Seconds of each step."""
    validations: list[tuple[int, float, float]] = field(default_factory=list)
    """Steps done, then the loss and the fraction of right answers, over all ranks."""
    drift: float = 0.0
    """Mean squared difference per parameter between two replicas, over all ranks."""
    arrived: float = 1.0
    """Fraction of the chunks that arrived, mean over the steps."""
    counters: Counters = field(default_factory=Counters)
    """Datagrams of this rank's transport."""


def run_training(settings: TrainSettings, advance: Advance = ignore_progress) -> TrainReport:
    """Trains under every policy and seed, and returns when all ranks have ended.

    Raises:
        stormtorch.checks.BadSetting: The data cannot be read.
        stormtorch_lab.jobs.failed.RankFailed: A rank failed or timed out.
        stormtorch_lab.netns.LabError: The lab failed, or this machine cannot make one.
    """
    task = settings.open_task()
    params = sum(parameter.numel() for parameter in task.model(0).parameters())
    requested = settings.to_json() | {"data": task.to_json()["data"], "params": params}
    conditions = surroundings()
    world, patience_s = settings.ranks, settings.timeout_s
    if settings.network is None:
        ranks, where = run_local(train_on_rank, world, (settings,), timeout_s=patience_s, advance=advance)
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
    return TrainReport(settings, requested, measured, conditions, results)


def result_of(trainings: Sequence[RankTraining], *, language: bool) -> TrainResult:
    """Merges the records of all ranks into one result."""
    first = trainings[0]
    # If slower ranks make fewer steps, only the steps made by all count.
    losses = [mean(step) for step in zip(*(each.losses for each in trainings), strict=False)]
    times_s = [max(step) for step in zip(*(each.times_s for each in trainings), strict=False)]
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
    """Runs one rank's part of all trainings."""
    task = settings.open_task()
    found: list[RankTraining] = []
    stage: Stage[Contender]
    with Stage(member, (), lab=settings.network is not None) as stage:
        for number, (seed, label) in enumerate(settings.trainings):
            # Not in a with statement: after goodbyes of a failed rank, the others' errors would hide its own.
            transport = connect(
                member.store,
                member.rank,
                member.world,
                Options(datagram_bytes=_DATAGRAM_BYTES, interface=member.interface),
                prefix=f"stormtorch/training/{number}",
            )
            if number == 0:
                stage.cue(LabRequest.LOSE)
                stage.cue(LabRequest.COUNT)
            in_lab = settings.network is not None
            loss = contextlib.nullcontext() if in_lab else faults(loss=settings.loss, burst=settings.burst, seed=seed)
            with loss:
                training = RankTraining(label, seed)
                _train(stage, Group(transport), task, settings.policy_of(label), settings.steps, training)
                training.counters = Counters.of(transport)
                stage.barrier()  # fault injection ends only when all ranks are done
            found.append(training)
            transport.close()
        stage.cue(LabRequest.READ)
    return found


def _train(
    stage: Stage[Contender], group: Group, task: Task, policy: Policy, steps: int, training: RankTraining
) -> None:
    model = task.model(training.seed)
    model, optimizer = prepare(model, task.optimizer(model.parameters()), policy=policy, group=group)
    rank = stage.member.rank
    stage.barrier()
    for step, done in _steps(policy, optimizer, steps):
        begin = time.perf_counter()
        batch = task.batch(training.seed, step, rank, stage.member.world)
        for parameters in optimizer.param_groups:
            parameters["lr"] = task.rate(min(step, steps - 1), steps)
        loss = task.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        if task.clip is not None:
            clip_grad_norm_(model.parameters(), task.clip)
        optimizer.step()
        optimizer.zero_grad()
        training.losses.append(float(loss.detach()))
        training.times_s.append(time.perf_counter() - begin)
        done.count(step + 1)
        if rank == 0:
            stage.member.report(f"{training.policy}, seed {training.seed}: loss {training.losses[-1]:.2f}")
        if done.all:
            # After the last parameters arrived (forward waits for them), and before anything makes the replicas equal.
            with torch.no_grad():
                model.eval()(batch.inputs)
            training.drift = _drift(stage, group, model)
            training.arrived = float(optimizer.ledger.summary()["arrived"])  # type: ignore[attr-defined]  # given by prepare
        if done.validates:
            training.validations.append((done.steps, *_validate(stage, model, task)))


class _Done:
    """Progress of a training, equal on all ranks at every validation."""

    def __init__(self, policy: Policy, optimizer: torch.optim.Optimizer, steps: int) -> None:
        self._session: Any = optimizer.session if isinstance(policy, RankPolicy) and policy.pace == "fastest" else None  # type: ignore[attr-defined]  # given by prepare
        self._last = steps
        if self._session is not None:
            # Ranks of different speeds make different numbers of steps, but the same number of exchanges.
            rounds = sum(policy.begins_at(number) <= steps for number in range(steps))  # type: ignore[attr-defined]  # as above
            self._last = policy.begins_at(max(rounds, 1) - 1)  # type: ignore[attr-defined]
        self._next = self._every = max(steps // _VALIDATIONS, 1)
        self.steps = 0
        """Number of steps done."""
        self.validates = False
        """Whether all ranks validate now."""

    @property
    def all(self) -> bool:
        """Whether all steps are done."""
        return self.steps >= self._last

    def count(self, steps: int) -> None:
        """Counts a step of this rank."""
        before = self.steps
        self.steps = steps if self._session is None else self._session.steps_of_rounds()
        self.validates = self.steps > before and (self.all or self.steps >= self._next)
        while self._next <= self.steps:
            self._next += self._every


def _steps(policy: Policy, optimizer: torch.optim.Optimizer, steps: int) -> Iterator[tuple[int, _Done]]:
    """Counts this rank's steps, until all ranks have made theirs."""
    done = _Done(policy, optimizer, steps)
    for step in itertools.count():
        if done.all:
            return
        yield step, done


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
    """Validation loss and accuracy; each rank evaluates its part of the held-out data."""
    with exact(model), torch.inference_mode():
        score = task.score(model, stage.member.rank, stage.member.world)
    loss, right, count = _mean_over_ranks(stage, list(score))
    return loss / count, right / count


def _mean_over_ranks(stage: Stage[Contender], values: list[float]) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64)
    stage.control.allreduce([tensor]).wait()
    found: list[float] = (tensor / stage.member.world).tolist()
    return found

"""The training of `bench colocate` on every rank: all runs one after the other in the same processes."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

import torch

from stormtorch.exchange.options import Options
from stormtorch.exchange.reliability import EXACT, Reliability
from stormtorch.policies import BoundedDrift, ModelAveraging
from stormtorch.policies.policy import Policy
from stormtorch.telemetry.ledger import LedgerRow
from stormtorch_lab.bench.language import evaluate, language_task
from stormtorch_lab.bench.replicas import GlooReplica, PreparedReplica, Replica, Workload, close_groups, open_groups
from stormtorch_lab.bench.services.colocate import DDP, DDP_LOW, NONE, STEPS_PER_CALL, Case, ColocateSettings, YieldTo
from stormtorch_lab.jobs.control import Stage
from stormtorch_lab.jobs.ranks import Member
from stormtorch_lab.netns.links.kernel_network import LOW_DSCP

NICE = 10
"""Niceness of the training, so that the service waits only for the network, not for a processor."""


def options_for(member: Member, yield_to: YieldTo, *, low: bool) -> Options:
    """Options of a training's transport: normal priority, or low priority, marked by its DSCP."""
    return Options(interface=member.interface, priority="low" if low else "normal", yield_to=yield_to)


def policy_for(train: str, deadline_s: float | None, allowed_loss: float | None = None) -> Policy:
    """Policy of a training by stormtorch: without retransmission if it has a deadline or an allowed loss, exact
    otherwise.
    """
    exact = deadline_s is None and allowed_loss is None
    reliability = EXACT if exact else Reliability(budget=1.0, deadline_s=deadline_s)
    if train == "model-averaging":
        return ModelAveraging(reliability=reliability, allowed_loss=allowed_loss)
    # Both would slow the training down: standbys receive everything exactly, the guard repairs bad broadcasts.
    return BoundedDrift(reliability=reliability, allowed_loss=allowed_loss, standby=0, guard=None)


# --- messages of ranks to the parent ---------------------------------------------------------------------------------


class Phase(IntEnum):
    """The next phase of all ranks."""

    MEASURE = 0
    """Make further steps, which are measured."""
    DRAIN = 1
    """Make further steps, not measured, until the last requests have ended."""
    END = 2


@dataclass(frozen=True)
class Prepare:
    """Rank 0 requests the network of a case; the parent runs a case without a training meanwhile."""

    case: int


@dataclass(frozen=True)
class Begin:
    """Rank 0 requests the start of the service: its training is running."""

    case: int


@dataclass(frozen=True)
class Look:
    """Rank 0 requests the next phase."""

    case: int
    made: bool
    """Whether all steps of the case are made."""


@dataclass
class RankTotals:
    """Counters of one rank in one case."""

    case: int
    steps: int = 0
    measured_steps: int = 0
    seconds: float = 0.0
    up: list[float] = field(default_factory=list)
    """Fraction that arrived in stage 1, for each exchange."""
    down: list[float] = field(default_factory=list)
    """Fraction that arrived in stage 2, for each exchange."""
    waits_s: list[float] = field(default_factory=list)
    """Seconds that the rank waited for both stages, for each exchange."""
    sent_bytes: int = 0
    """Bytes of datagrams."""
    interface_bytes: int = 0
    """Bytes that the host sent, the service's included."""
    deadline_s: float | None = None
    validation: float | None = None
    last_validation: float | None = None

    def add(self, row: LedgerRow) -> None:
        """Counts one exchange."""
        self.up.append(mean_of(list(row.gradients.values())))
        self.down.append(mean_of(list(row.broadcast.values())))
        self.waits_s.append(row.gradient_wait_s + row.broadcast_wait_s)
        self.sent_bytes += row.bytes_sent


def mean_of(fractions: Sequence[float]) -> float:
    """Mean fraction that arrived; 1 if nothing was sent."""
    return sum(fractions) / len(fractions) if fractions else 1.0


# --- on every rank ---------------------------------------------------------------------------------------------------


def rank_trains(member: Member, settings: ColocateSettings) -> None:
    """A rank's part of all runs."""
    os.nice(NICE)
    open_groups(member)
    deadlines_s: dict[str, float] = {}
    stage: Stage[Replica]
    with Stage(member, []) as stage:
        for index, case in enumerate(settings.cases()):
            stage.barrier()
            if member.rank == 0:
                member.request(Prepare(index))
            stage.barrier()
            if case.train != NONE:
                totals = _TrainingRank(stage, settings, index, case, deadlines_s.get(case.train)).run()
                fixed = settings.allowed_loss is None and case.train not in (DDP, DDP_LOW)
                if fixed and case.requests is None and case.train not in deadlines_s:
                    deadlines_s[case.train] = settings.deadline_s or settings.slack * _stage_s(stage, totals)
                member.report(totals)
    close_groups()


def _stage_s(stage: Stage[Replica], totals: RankTotals) -> float:
    """Seconds of one of the two stages without the service: the longest wait of any rank in a step, median over steps.

    A deadline counts from when a rank begins, so the rank that begins first needs the longest one.
    """
    waits_s = torch.tensor([totals.waits_s] * stage.member.world, dtype=torch.float64)
    waits_s[torch.arange(stage.member.world) != stage.member.rank] = 0.0
    stage.control.allreduce([waits_s]).wait()
    return float(waits_s.max(dim=0).values.median()) / 2


class _TrainingRank:
    """One training on this rank, from its first step to the end of its run."""

    def __init__(
        self, stage: Stage[Replica], settings: ColocateSettings, index: int, case: Case, deadline_s: float | None
    ) -> None:
        self._stage, self._settings, self._case = stage, settings, case
        self._counts = False
        self.totals = RankTotals(index, deadline_s=deadline_s if case.requests is not None else None)
        member = stage.member
        task, self._held_out = language_task(
            member.rank,
            member.world,
            size=settings.model,
            batch=settings.batch,
            context=settings.context,
            lr=settings.lr,
            seed=case.seed,
            text=settings.text,
        )
        self._replica = self._open(task)

    def _open(self, task: Workload) -> Replica:
        member, case = self._stage.member, self._case
        low = case.low_share is not None
        if case.train in (DDP, DDP_LOW):
            peer = GlooReplica("gloo", task, member)
            if low:
                for stream in peer.connections.streams:
                    stream.mark(LOW_DSCP[0])
            return peer
        allowed_loss = None if case.requests is None else self._settings.allowed_loss
        policy = policy_for(case.train, self.totals.deadline_s, allowed_loss)
        replica = PreparedReplica(
            *(case.train, task, member, policy),
            options=options_for(member, self._settings.yield_to, low=low),
        )
        replica.ledger.on_row(self._count)
        return replica

    def _count(self, row: LedgerRow) -> None:
        if self._counts:
            self.totals.add(row)

    def run(self) -> RankTotals:
        """Trains until the parent ends the run."""
        totals, member = self.totals, self._stage.member
        self._run_steps()  # the first steps open connections and allocate memory
        self._stage.barrier()
        if member.rank == 0:
            member.request(Begin(totals.case))
        self._stage.barrier()
        phase = Phase.MEASURE
        while phase is not Phase.END:
            self._counts = phase is Phase.MEASURE
            before_s, before_bytes = time.perf_counter(), interface_bytes(member.interface)
            self._run_steps()
            if self._counts:
                totals.seconds += time.perf_counter() - before_s
                totals.interface_bytes += interface_bytes(member.interface) - before_bytes
                totals.measured_steps += STEPS_PER_CALL
            self._counts = False
            if totals.steps == self._settings.turns * STEPS_PER_CALL:
                totals.validation = self._evaluate()
            phase = self._next_phase()
        totals.last_validation = self._evaluate()
        self._stage.barrier()
        self._replica.close()
        self._stage.barrier()
        return totals

    def _run_steps(self) -> None:
        self._replica.run_steps(STEPS_PER_CALL)
        self.totals.steps += STEPS_PER_CALL

    def _evaluate(self) -> float:
        self._replica.synchronise()
        return evaluate(self._stage, self._replica, self._held_out)

    def _next_phase(self) -> Phase:
        stage, totals = self._stage, self.totals
        said = torch.zeros(1, dtype=torch.int64)
        if stage.member.rank == 0:
            made = totals.steps >= self._settings.turns * STEPS_PER_CALL
            said.fill_(int(stage.member.request(Look(totals.case, made))))
        stage.control.allreduce([said]).wait()
        return Phase(int(said))


def interface_bytes(interface: str) -> int:
    """Bytes that this host has sent by an interface, Ethernet headers included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == interface:
            return int(counts.split()[8])
    return 0

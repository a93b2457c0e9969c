"""Runs of a web service and a training that share the lines of a lab; all of them in the same processes."""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch

from stormtorch.bench.colocate import DDP, DDP_LOW, NONE, TURN, Case, ColocateSettings, RunResult, TrainingResult
from stormtorch.bench.language import evaluate, language_task
from stormtorch.bench.replicas import GlooReplica, PreparedReplica, Replica, Task, close_groups, open_groups
from stormtorch.bench.service import Done, Service, ServiceResult
from stormtorch.jobs.control import Stage
from stormtorch.jobs.ranks import Member, run_ranks
from stormtorch.lab.lab import Lab
from stormtorch.lab.measured import Measured
from stormtorch.lab.wires import LOW_DSCP
from stormtorch.network.units import parse_rate
from stormtorch.policies import BoundedDrift, ModelAveraging
from stormtorch.policies.ledger import Row
from stormtorch.policies.policy import Policy
from stormtorch.reliability import EXACT, Reliability
from stormtorch.results.progress import Advance, ignore_progress
from stormtorch.results.statistics import median
from stormtorch.transport.options import Options

NICE = 10
"""Niceness of the training, so that the service waits for the network and not for a processor."""
# Requests due in the first part of a run open connections; they are sent and not counted.
_FIRST_S = 0.5
_LOOK_S = 0.05

Keep = Callable[[RunResult], None]
"""Function that is called with each run as soon as it has ended."""
Describe = Callable[[dict[str, Any]], None]
"""Function that is called with what is measured of the lab and of processes when they have started."""


def run_colocate(
    settings: ColocateSettings,
    keep: Keep,
    advance: Advance = ignore_progress,
    describe: Describe | None = None,
) -> None:
    """Makes all runs, one after the other, in one lab with the same servers, clients and ranks.

    Args:
        settings: What to run.
        keep: Called with each run as soon as it has ended.
        advance: Called with the number of runs that are done.
        describe: Called once with what was measured of the lab, and with the niceness of everyone.

    Raises:
        stormtorch.jobs.failed.RankFailed: A rank failed or did not end in time.
        stormtorch.lab.LabError: The lab, a server or a client failed, or there is none here.
    """
    with (
        Lab(settings.ranks, settings.network, management=True) as lab,
        Service(lab, size=settings.size, timeout_s=settings.request_timeout_s) as service,
    ):
        director = _Director(settings, lab, service, keep, advance)
        if describe is not None:
            describe(
                {
                    "network": f"lab: {lab.kind}",
                    "lab_made_by": lab.access.name,
                    "measured": _probed(lab.measured()),
                    "nice": {"service": service.nice, "training": NICE},
                    "sessions_share_processors": _autogroup(),
                }
            )
        if all(case.train == NONE for case in settings.cases()):
            for index in range(len(settings.cases())):
                director.serve_alone(index)
            return
        run_ranks(
            rank_trains, settings.ranks, (settings,), timeout_s=settings.timeout_s, listen=director.listen, lab=lab
        )


def options_for(member: Member, *, low: bool) -> Options:
    """Options of a training's transport: unmarked, or of low priority, so that lines can prefer others."""
    return Options(interface=member.interface, rate="low" if low else "auto")


def policy_for(train: str, deadline_s: float | None) -> Policy:
    """Policy of a training by stormtorch: exact without a deadline; nothing is sent again with one."""
    reliability = EXACT if deadline_s is None else Reliability(budget=1.0, deadline_s=deadline_s)
    if train == "model-averaging":
        return ModelAveraging(reliability=reliability)
    # Neither would keep the pace: a standby is sent everything exactly, a guard makes bad broadcasts exact.
    return BoundedDrift(reliability=reliability, standby=0, guard=None)


# --- messages of ranks to the parent ---------------------------------------------------------------------------------


class Phase(IntEnum):
    """What ranks do next."""

    MEASURE = 0
    """Make further steps, which count."""
    DRAIN = 1
    """Make further steps while the last requests end; they do not count."""
    END = 2


@dataclass(frozen=True)
class _Prepare:
    """Rank 0 asks for the network of a case; a case without a training is run by the parent meanwhile."""

    case: int


@dataclass(frozen=True)
class _Begin:
    """Rank 0 asks for the service: its training is under way."""

    case: int


@dataclass(frozen=True)
class _Look:
    """Rank 0 asks for the next phase."""

    case: int
    made: bool
    """Whether all steps of the case are made."""


@dataclass
class _Account:
    """What one rank counted in one case."""

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
    line_bytes: int = 0
    """Bytes that the host sent, the service's included."""
    deadline_s: float | None = None
    validation: float | None = None
    last_validation: float | None = None

    def add(self, row: Row) -> None:
        self.up.append(_mean_of(list(row.gradients.values())))
        self.down.append(_mean_of(list(row.broadcast.values())))
        self.waits_s.append(row.gradient_wait_s + row.broadcast_wait_s)
        self.sent_bytes += row.bytes_sent


def _mean_of(fractions: Sequence[float]) -> float:
    return sum(fractions) / len(fractions) if fractions else 1.0


# --- the parent ------------------------------------------------------------------------------------------------------


class _Director:
    """Answers ranks: sets the network, begins and ends the service, and sums up each run."""

    def __init__(self, settings: ColocateSettings, lab: Lab, service: Service, keep: Keep, advance: Advance) -> None:
        self._settings, self._lab, self._service = settings, lab, service
        self._keep, self._advance = keep, advance
        self._cases = settings.cases()
        self._accounts: list[_Account] = []
        self._alone: dict[tuple[str, int], float | None] = {}
        self._begun_s = 0.0
        self._seconds = 0.0
        self._measured = Measured(links=[], lines=[])
        self._requests: list[Done] = []
        self._done = 0

    def listen(self, _rank: int, what: object) -> object:
        if isinstance(what, _Look):
            return self._look(self._cases[what.case], made=what.made)
        if isinstance(what, _Prepare):
            self._prepare(what.case)
        elif isinstance(what, _Begin):
            self._begin(self._cases[what.case])
        elif isinstance(what, _Account):
            self._accounts.append(what)
            if len(self._accounts) == self._settings.ranks:
                accounts, self._accounts = self._accounts, []
                self._finish(self._cases[what.case], accounts)
        return None

    def _prepare(self, index: int) -> None:
        case = self._cases[index]
        self._advance(str(case), self._done)
        self._lab.set(low_share=case.low_share)
        if case.train == NONE:
            self.serve_alone(index)

    def serve_alone(self, index: int) -> None:
        """Makes a run without a training."""
        case = self._cases[index]
        self._advance(str(case), self._done)
        self._begin(case)
        before = time.monotonic()
        while self._look(case, made=True) is not Phase.END:
            time.sleep(_LOOK_S)
            assert time.monotonic() - before < self._settings.timeout_s
        self._finish(case, [])

    def _begin(self, case: Case) -> None:
        self._lab.reset()
        self._begun_s = time.monotonic()
        self._requests = []
        if case.requests:
            self._service.begin(rate=case.requests, seed=case.seed)

    def _look(self, case: Case, *, made: bool) -> Phase:
        settings, alone = self._settings, not case.requests
        seconds = time.monotonic() - self._begun_s if alone else self._service.runs_for_s
        if self._seconds == 0.0:
            if not made and seconds < settings.limit_s:
                return Phase.MEASURE
            if not alone and seconds < settings.seconds:
                return Phase.MEASURE
            self._seconds = seconds
            self._measured = self._lab.measured()
            if not alone:
                self._service.stop()
        if not alone:
            if not self._service.ended:
                return Phase.DRAIN
            self._requests = self._service.wait()
        return Phase.END

    def _finish(self, case: Case, accounts: Sequence[_Account]) -> None:
        seconds, self._seconds = self._seconds, 0.0
        training = _training(case, accounts) if accounts else None
        if training is not None and case.requests is None:
            self._alone[case.train, case.seed] = training.validation
        elif training is not None and training.validation is not None:
            alone = self._alone.get((case.train, case.seed))
            training = replace(training, validation_ratio=training.validation / alone if alone else None)
        service = None
        if case.requests:
            service = ServiceResult.of(self._requests, seconds=seconds, first_s=min(_FIRST_S, seconds / 2))
        self._done += 1
        self._advance(str(case), self._done)
        self._keep(
            RunResult(
                case=case,
                seconds=seconds,
                service=service,
                training=training,
                line_use=self._line_use(accounts),
                low_share=self._lab.conditions.low_share,
                drops=_drops(self._measured),
            )
        )

    def _line_use(self, accounts: Sequence[_Account]) -> float | None:
        rate = parse_rate(self._settings.network.rate)
        shares = [8 * each.line_bytes / each.seconds / rate for each in accounts if each.seconds > 0.0]
        return sum(shares) / len(shares) if shares else None


def _training(case: Case, accounts: Sequence[_Account]) -> TrainingResult:
    """Sums up what all ranks counted."""
    first = accounts[0]
    steps = first.measured_steps
    seconds = max(each.seconds for each in accounts)
    up = 1.0 - _mean_of([value for each in accounts for value in each.up]) if first.up else None
    down = 1.0 - _mean_of([value for each in accounts for value in each.down]) if first.down else None
    by_gloo = case.train in (DDP, DDP_LOW)
    longest_s = [max(waits) for waits in zip(*(each.waits_s for each in accounts), strict=False)]
    return TrainingResult(
        steps=first.steps,
        measured_steps=steps,
        step_s=seconds / steps if steps else None,
        loss=0.0 if by_gloo else None if up is None or down is None else (up + down) / 2,
        loss_up=0.0 if by_gloo else up,
        loss_down=0.0 if by_gloo else down,
        bytes_per_step=None
        if by_gloo or not steps
        else sum(each.sent_bytes for each in accounts) / len(accounts) / steps,
        deadline_s=first.deadline_s,
        exchange_s=median(longest_s) if longest_s else None,
        validation=first.validation,
        last_validation=first.last_validation,
    )


def _drops(measured: Measured) -> dict[str, Any]:
    lines = measured.lines
    up = [line for line in lines if line.direction == "up"]
    return {
        "packets": sum(line.packets + line.overflowed for line in up),
        "dropped": sum(line.overflowed for line in lines),
        "low_packets": sum((line.low_packets or 0) + (line.low_overflowed or 0) for line in up),
        "low_dropped": sum(line.low_overflowed or 0 for line in lines),
        "loss": measured.overflow,
        "low_loss": measured.low_loss,
    }


def _probed(measured: Measured) -> dict[str, Any]:
    return {"rates_bits_per_s": measured.rates_bits, "round_trips_s": measured.round_trips_s}


def _autogroup() -> bool:
    """Whether sessions share processors before niceness counts; clients and servers have sessions of their own."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/sched_autogroup_enabled").read_text().strip() == "1"
    return False


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
                member.ask(_Prepare(index))
            stage.barrier()
            if case.train != NONE:
                account = _Trainee(stage, settings, index, case, deadlines_s.get(case.train)).run()
                if case.requests is None and case.train not in deadlines_s and case.train not in (DDP, DDP_LOW):
                    deadlines_s[case.train] = settings.deadline_s or settings.slack * _stage_s(stage, account)
                member.tell(account)
    close_groups()


def _stage_s(stage: Stage[Replica], account: _Account) -> float:
    """Seconds that one of two stages takes alone: of each step the longest wait of a rank, and of all steps the median.

    A deadline counts from when a rank begins, so the rank that begins first needs the longest one.
    """
    waits_s = torch.tensor([account.waits_s] * stage.member.world, dtype=torch.float64)
    waits_s[torch.arange(stage.member.world) != stage.member.rank] = 0.0
    stage.control.allreduce([waits_s]).wait()
    return float(waits_s.max(dim=0).values.median()) / 2


class _Trainee:
    """One training on this rank, from its first step to the end of its run."""

    def __init__(
        self, stage: Stage[Replica], settings: ColocateSettings, index: int, case: Case, deadline_s: float | None
    ) -> None:
        self._stage, self._settings, self._case = stage, settings, case
        self._counts = False
        self.account = _Account(index, deadline_s=deadline_s if case.requests is not None else None)
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

    def _open(self, task: Task) -> Replica:
        member, case = self._stage.member, self._case
        low = case.low_share is not None
        if case.train in (DDP, DDP_LOW):
            peer = GlooReplica("gloo", task, member)
            if low:
                for stream in peer.connections.streams:
                    stream.mark(LOW_DSCP[0])
            return peer
        replica = PreparedReplica(
            *(case.train, task, member, policy_for(case.train, self.account.deadline_s)),
            options=options_for(member, low=low),
        )
        replica.ledger.on_row(self._count)
        return replica

    def _count(self, row: Row) -> None:
        if self._counts:
            self.account.add(row)

    def run(self) -> _Account:
        """Trains until the parent says that the run is over."""
        account, member = self.account, self._stage.member
        self._turn()  # connections and memory are made in the first steps
        self._stage.barrier()
        if member.rank == 0:
            member.ask(_Begin(account.case))
        self._stage.barrier()
        phase = Phase.MEASURE
        while phase is not Phase.END:
            self._counts = phase is Phase.MEASURE
            before_s, before_bytes = time.perf_counter(), line_bytes(member.interface)
            self._turn()
            if self._counts:
                account.seconds += time.perf_counter() - before_s
                account.line_bytes += line_bytes(member.interface) - before_bytes
                account.measured_steps += TURN
            self._counts = False
            if account.steps == self._settings.turns * TURN:
                account.validation = self._evaluate()
            phase = self._next_phase()
        account.last_validation = self._evaluate()
        self._stage.barrier()
        self._replica.close()
        self._stage.barrier()
        return account

    def _turn(self) -> None:
        self._replica.turn(TURN)
        self.account.steps += TURN

    def _evaluate(self) -> float:
        self._replica.synchronise()
        return evaluate(self._stage, self._replica, self._held_out)

    def _next_phase(self) -> Phase:
        stage, account = self._stage, self.account
        said = torch.zeros(1, dtype=torch.int64)
        if stage.member.rank == 0:
            made = account.steps >= self._settings.turns * TURN
            said.fill_(int(stage.member.ask(_Look(account.case, made))))
        stage.control.allreduce([said]).wait()
        return Phase(int(said))


def line_bytes(interface: str) -> int:
    """Bytes that this host has sent by an interface, Ethernet headers included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == interface:
            return int(counts.split()[8])
    return 0

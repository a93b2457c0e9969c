"""Runs `bench colocate`: a web service and a training that share the links of a lab, all runs in the same processes."""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stormtorch.network.units import parse_rate
from stormtorch.telemetry.progress import Advance, ignore_progress
from stormtorch.telemetry.statistics import median
from stormtorch_lab.bench.services.colocate import DDP, DDP_LOW, NONE, Case, ColocateSettings
from stormtorch_lab.bench.services.colocate_rank import (
    NICE,
    Begin,
    Look,
    Phase,
    Prepare,
    RankTotals,
    mean_of,
    rank_trains,
)
from stormtorch_lab.bench.services.colocate_results import RunResult, TrainingResult
from stormtorch_lab.bench.services.service import Done, Service, ServiceResult
from stormtorch_lab.jobs.ranks import run_ranks
from stormtorch_lab.netns.lab import Lab
from stormtorch_lab.netns.measured import Measured

# Requests due in the first part of a run open connections; they are sent but not measured.
_FIRST_S = 1.0
_LOOK_S = 0.05

Keep = Callable[[RunResult], None]
"""Function that is called with each run as soon as it has ended."""
Describe = Callable[[dict[str, Any]], None]
"""Function that is called with measurements of the lab and the processes when they have started."""


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
        advance: Called with the number of finished runs.
        describe: Called once with the measurements of the lab and the niceness of all processes.

    Raises:
        stormtorch_lab.jobs.failed.RankFailed: A rank failed or timed out.
        stormtorch_lab.netns.LabError: The lab, a server or a client failed, or this machine cannot make a lab.
    """
    with (
        Lab(settings.ranks, settings.network, management=True) as lab,
        Service(lab, size=settings.size, timeout_s=settings.request_timeout_s) as service,
    ):
        director = _Coordinator(settings, lab, service, keep, advance)
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
            rank_trains,
            settings.ranks,
            (settings,),
            timeout_s=settings.timeout_s,
            on_message=director.on_message,
            lab=lab,
        )


class _Coordinator:
    """Serves requests of the ranks: sets the network, starts and stops the service, and summarises each run."""

    def __init__(self, settings: ColocateSettings, lab: Lab, service: Service, keep: Keep, advance: Advance) -> None:
        self._settings, self._lab, self._service = settings, lab, service
        self._keep, self._advance = keep, advance
        self._cases = settings.cases()
        self._accounts: list[RankTotals] = []
        self._alone: dict[tuple[str, int], float | None] = {}
        self._begun_s = 0.0
        self._seconds = 0.0
        self._measured = Measured(links=[], lines=[])
        self._requests: list[Done] = []
        self._done = 0

    def on_message(self, _rank: int, what: object) -> object:
        """Handles one message of a rank."""
        if isinstance(what, Look):
            return self._look(self._cases[what.case], made=what.made)
        if isinstance(what, Prepare):
            self._prepare(what.case)
        elif isinstance(what, Begin):
            self._begin(self._cases[what.case])
        elif isinstance(what, RankTotals):
            self._accounts.append(what)
            if len(self._accounts) == self._settings.ranks:
                rank_totals, self._accounts = self._accounts, []
                self._finish(self._cases[what.case], rank_totals)
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
        while self._look(case, made=True) is not Phase.END:
            time.sleep(_LOOK_S)
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

    def _finish(self, case: Case, rank_totals: Sequence[RankTotals]) -> None:
        seconds, self._seconds = self._seconds, 0.0
        training = _training(case, rank_totals) if rank_totals else None
        if training is not None and case.requests is None:
            self._alone[case.train, case.seed] = training.validation
        elif training is not None and training.validation is not None:
            alone = self._alone.get((case.train, case.seed))
            training = replace(training, validation_ratio=training.validation / alone if alone else None)
        service = None
        if case.requests:
            # The same requests in all runs, independent of the time of their trainings.
            until_s = min(seconds, self._settings.seconds)
            service = ServiceResult.of(self._requests, seconds=until_s, first_s=min(_FIRST_S, until_s / 4))
        self._done += 1
        self._advance(str(case), self._done)
        self._keep(
            RunResult(
                case=case,
                seconds=seconds,
                service=service,
                training=training,
                line_use=self._line_use(rank_totals),
                low_share=self._lab.conditions.low_share,
                drops=_drops(self._measured),
            )
        )

    def _line_use(self, rank_totals: Sequence[RankTotals]) -> float | None:
        rate = parse_rate(self._settings.network.rate)
        shares = [8 * each.interface_bytes / each.seconds / rate for each in rank_totals if each.seconds > 0.0]
        return sum(shares) / len(shares) if shares else None


def _training(case: Case, rank_totals: Sequence[RankTotals]) -> TrainingResult:
    """Summarises the counters of all ranks."""
    first = rank_totals[0]
    steps = first.measured_steps
    seconds = max(each.seconds for each in rank_totals)
    up = 1.0 - mean_of([value for each in rank_totals for value in each.up]) if first.up else None
    down = 1.0 - mean_of([value for each in rank_totals for value in each.down]) if first.down else None
    by_gloo = case.train in (DDP, DDP_LOW)
    longest_s = [max(waits) for waits in zip(*(each.waits_s for each in rank_totals), strict=False)]
    return TrainingResult(
        steps=first.steps,
        measured_steps=steps,
        step_s=seconds / steps if steps else None,
        loss=0.0 if by_gloo else None if up is None or down is None else (up + down) / 2,
        loss_up=0.0 if by_gloo else up,
        loss_down=0.0 if by_gloo else down,
        bytes_per_step=None
        if by_gloo or not steps
        else sum(each.sent_bytes for each in rank_totals) / len(rank_totals) / steps,
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
    """Whether autogroup is on: niceness then counts only inside a session, and each client and server has its own."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/sched_autogroup_enabled").read_text().strip() == "1"
    return False

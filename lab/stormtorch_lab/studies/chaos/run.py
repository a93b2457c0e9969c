"""A chaos run: a training under scheduled faults of hosts and links, one without faults for comparison, a report."""

import math
import os
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from stormtorch.exchange.keys import VARIABLE as KEY_VARIABLE
from stormtorch.telemetry.progress import Advance, ignore_progress
from stormtorch_lab.jobs.failed import RankFailed
from stormtorch_lab.jobs.surroundings import surroundings
from stormtorch_lab.netns.lab import Lab
from stormtorch_lab.studies.chaos.fault_injector import LEAVE_S, WORKER, FaultInjector
from stormtorch_lab.studies.chaos.faults import Fault
from stormtorch_lab.studies.chaos.invariants import Run, check_run, final_loss
from stormtorch_lab.studies.chaos.logs import History
from stormtorch_lab.studies.chaos.report import ChaosReport
from stormtorch_lab.studies.chaos.settings import ChaosSettings
from stormtorch_lab.studies.chaos.timeline import recoveries

_TICK_S = 0.05
_LOOK_EVERY_S = 0.5
# Time for all processes to start and make their first steps, on a busy machine.
_START_S = 120.0
# Wait limits without a step after which the run is aborted.
_ABORT_FACTOR = 3.0
# Final part of the training with a falling learning rate, so that losses vary little between runs.
_DECAY = 0.1
_LEAST_DECAY_STEPS = 100
# Kinds of faults that remove hosts, and the time within which a training host makes a step.
_TAKES_HOSTS = ("kill", "pause", "cut", "link", "partition", "leave")
_TRAINS_S = 1.5
# The end is announced this far ahead, so that all ranks receive it in time.
_AHEAD_S = 3.0
_AHEAD_STEPS = 20


def run_chaos(
    settings: ChaosSettings, folder: Path, advance: Advance = ignore_progress, *, command: Sequence[str] = WORKER
) -> ChaosReport:
    """Runs the training with faults, then the one without, and returns when all processes have ended.

    Args:
        settings: Settings of the run.
        folder: Folder for the logs of all processes, which must be empty.
        advance: Called with the current activity and the elapsed seconds of the schedule.
        command: Command prefix of every process, see `FaultInjector`.

    Raises:
        stormtorch_lab.jobs.failed.RankFailed: The training did not start.
        stormtorch_lab.netns.LabError: The lab failed, or this machine cannot make one.
    """
    faults = settings.schedule()
    conditions = surroundings()
    advance(f"making {settings.hosts + settings.spares} hosts", 0)
    with Lab(settings.hosts + settings.spares, settings.network.changed(seed=settings.seed)) as lab:
        injector = FaultInjector(lab, settings, folder / "chaos", pace_s=settings.pace_s, command=command)
        _start(lab, injector, settings, advance)
        start_s = time.monotonic()
        lab.reset()
        waited_s = _inject_faults(injector, faults, settings, start_s, advance)
        _calm(injector, settings, advance)
        finish_s = time.monotonic()
        measured = lab.measured()
        decay_at, stop_at = _end(injector, settings, advance)
        history = injector.history()
        undisturbed, undisturbed_loss = None, None
        if settings.baseline and final_loss(history) is not None:
            calm = FaultInjector(lab, settings, folder / "undisturbed", pace_s=0.0, command=command)
            calm.announce_end(decay_at, stop_at)
            undisturbed = _undisturbed(lab, calm, settings, stop_at, advance)
            undisturbed_loss = lab.measured().loss
        conditions |= {
            "network": f"lab: {lab.kind}",
            "sealed": bool(os.environ.get(KEY_VARIABLE)),
            "lab_made_by": lab.access.name,
            "requested": settings.network.to_json(),
            "measured": measured.to_json(),
            "undisturbed_loss_measured": undisturbed_loss,
            "faults_waited_s": round(waited_s, 1),
        }
    struck = sorted(injector.struck, key=lambda each: each.began_s)
    run = Run(
        history=history,
        struck=struck,
        ended=injector.ended,
        start_s=start_s,
        finish_s=finish_s,
        hosts=settings.hosts,
        patience_s=settings.patience_s,
        undisturbed=undisturbed,
    )
    return ChaosReport(
        settings=settings,
        conditions=conditions,
        history=history,
        start_s=start_s,
        finish_s=finish_s,
        recoveries=recoveries(history, struck),
        planned=len(faults),
        checks=check_run(run),
        undisturbed=undisturbed,
        folder=folder,
    )


def _start(lab: Lab, injector: FaultInjector, settings: ChaosSettings, advance: Advance) -> None:
    """Starts all processes, and waits until each has made a few steps, without network faults."""
    lab.set(loss=0.0)
    injector.open_store()
    for host in range(settings.hosts):
        injector.start(host)
    deadline = time.monotonic() + _START_S
    while True:
        process_logs = injector.history().process_logs
        ready = sum(len(process_log.steps) >= 3 for process_log in process_logs)
        advance(f"{ready} of {settings.hosts} processes train", 0)
        if ready == settings.hosts:
            break
        for host in range(settings.hosts):
            if not injector.runs(host):
                error = next((process_log.error for process_log in process_logs if process_log.host == host), None)
                raise RankFailed(
                    f"the process of h{host} exited before its first steps: {error or injector.last_output_line(host)}",
                    rank=host,
                )
        if time.monotonic() > deadline:
            raise RankFailed(f"only {ready} of {settings.hosts} processes trained after {_START_S:g} s")
        time.sleep(0.2)
    lab.set(loss=settings.network.loss)


def _inject_faults(
    injector: FaultInjector, faults: tuple[Fault, ...], settings: ChaosSettings, start_s: float, advance: Advance
) -> float:
    """Applies and ends every fault. Returns the seconds for which faults had to wait.

    A fault that removes hosts waits until a quorum would be left: on a slow machine, restarts take longer than the
    schedule assumes.
    """
    due = deque(faults)
    look_at = start_s
    moved_s, moved_to = start_s, 0
    waited_s = 0.0
    before = start_s
    while True:
        now = time.monotonic()
        for fault, began_s in injector.active.items():
            if now - began_s >= fault.lasts_s:
                injector.end(fault)
        if now >= look_at:
            look_at = now + _LOOK_EVERY_S
            injector.restart_exited(now)
            history = injector.history()
            outage = any(fault.kind == "outage" for fault in injector.active)
            if history.last_step > moved_to or outage:
                moved_s, moved_to = now, history.last_step
            if now - moved_s > _ABORT_FACTOR * settings.patience_s:
                return waited_s  # the invariants report the reason
            advance(_status_text(history, injector), round(now - start_s - waited_s))
        while due and now - start_s - waited_s >= due[0].at_s:
            if not _leaves_majority(due[0], injector.history(), settings, now):
                waited_s += now - before
                break
            injector.begin(due.popleft())
        if not due and not injector.active and now - start_s - waited_s >= 60.0 * settings.minutes:
            return waited_s
        before = now
        time.sleep(_TICK_S)


def _leaves_majority(fault: Fault, history: History, settings: ChaosSettings, now: float) -> bool:
    """Whether a quorum of the training hosts would be left after a fault."""
    if fault.kind not in _TAKES_HOSTS:
        return True
    there = {host for host in range(settings.hosts) if history.stepped(host, now - _TRAINS_S) is not None}
    taken = 1 if fault.kind == "link" else len(there & set(fault.hosts))  # for a link, one end leaves
    return 2 * (len(there) - taken) > settings.hosts


def _calm(injector: FaultInjector, settings: ChaosSettings, advance: Advance) -> None:
    """Ends active faults, and waits until all hosts train again or the wait limit is reached."""
    begin = time.monotonic()
    while (now := time.monotonic()) < begin + settings.patience_s + LEAVE_S:
        for fault in injector.active:
            injector.end(fault)
        injector.restart_exited(now)
        history = injector.history()
        back = [host for host in range(settings.hosts) if history.stepped(host, max(begin, now - 2.0)) is not None]
        advance(f"calm: {len(back)} of {settings.hosts} hosts train", round(60.0 * settings.minutes))
        if len(back) == settings.hosts and not injector.active:
            return
        time.sleep(_LOOK_EVERY_S)


def _end(injector: FaultInjector, settings: ChaosSettings, advance: Advance) -> tuple[int, int]:
    """Announces the end, and waits for it. Returns the step at which the learning rate begins to fall, and the last."""
    history = injector.history()
    recent = [step for t, step in history.frontier if t > time.monotonic() - 10.0]
    rate = (recent[-1] - recent[0]) / 10.0 if recent else 0.0
    decay_at = history.last_step + max(_AHEAD_STEPS, round(_AHEAD_S * rate))
    stop_at = decay_at + max(_LEAST_DECAY_STEPS, round(_DECAY * decay_at))
    injector.announce_end(decay_at, stop_at)
    _wait(injector, settings, stop_at, advance, "end")
    return decay_at, stop_at


def _undisturbed(lab: Lab, injector: FaultInjector, settings: ChaosSettings, steps: int, advance: Advance) -> float:
    """Trains without faults, and returns the validation loss; NaN if the training failed."""
    lab.set(cut=(), cut_links=(), lines=settings.network.lines)
    try:
        _start(lab, injector, settings, advance)
    except RankFailed:
        injector.kill()
        return math.nan  # the results under faults are kept
    lab.reset()
    _wait(injector, settings, steps, advance, "undisturbed run")
    loss = final_loss(injector.history())
    return math.nan if loss is None else loss


def _wait(injector: FaultInjector, settings: ChaosSettings, steps: int, advance: Advance, what: str) -> None:
    """Waits until all processes have ended, or no steps are made."""
    moved_s, moved_to = time.monotonic(), 0
    while any(injector.runs(host) for host in range(settings.hosts)):
        history = injector.history()
        now = time.monotonic()
        if history.last_step > moved_to:
            moved_s, moved_to = now, history.last_step
        if now - moved_s > settings.patience_s + LEAVE_S:
            break
        advance(f"{what}: step {history.last_step} of {steps}", round(60.0 * settings.minutes))
        time.sleep(_LOOK_EVERY_S)
    injector.kill()


def _status_text(history: History, injector: FaultInjector) -> str:
    views = [process_log.steps[-1].view for process_log in history.process_logs if process_log.steps]
    view = max((each for each in views if each is not None), default=None)
    where = "" if view is None else f" in view {view}"
    faults = ", ".join(fault.description for fault in injector.active) or "calm"
    return f"step {history.last_step}{where}, {faults}"

"""Snapshot of a job: the state of each rank, the breakdown of a step, and every link."""

from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from stormtorch.watch.job import Job
from stormtorch.watch.process import Process, StepTotals

RECENT_S = 30.0
"""Averaging window of current values: long enough to be smooth, short enough to follow a changing network."""
# A rank writes records about once a second. It is silent if none arrives for this many seconds, or for this many of its
# steps if that is longer.
_SILENT_S = 10.0
_SILENT_STEPS = 4.0


class State(StrEnum):
    """State of a process or of a job."""

    EMPTY = "empty"
    """No records yet."""
    RUNNING = "running"
    SILENT = "silent"
    """State of a process that has not ended, but has not reported for a while."""
    GONE = "gone"
    """The other ranks agreed on a view without it."""
    LEFT = "left"
    """It transferred its shard and left."""
    DONE = "done"
    FAILED = "failed"


class LinkState(NamedTuple):
    """One direction of one link."""

    sender: int
    receiver: int
    loss: float | None
    rtt_s: float | None
    rate: float | None


class StepBreakdown(NamedTuple):
    """Breakdown of a rank's mean step."""

    compute_s: float
    straggler_s: float
    """Waiting for the rank that computes longest."""
    network_s: float
    """Waiting for the network."""
    view_s: float
    """Waiting for views, when ranks join or leave."""

    @property
    def step_s(self) -> float:
        """Seconds of the whole step."""
        return sum(self)


class JobSnapshot:
    """A job at one time. Every property is computed once, on first access.

    Args:
        job: The job; it must not change while the snapshot is in use.
        now: Unix time by the watcher's clock, which also timestamps arrivals.
    """

    def __init__(self, job: Job, now: float) -> None:
        self.job, self.now = job, now

    @cached_property
    def everyone(self) -> dict[int, Process]:
        """The latest process of each rank, by rank."""
        return self.job.current

    @cached_property
    def states(self) -> dict[int, State]:
        """State of the latest process of each rank."""
        found = {rank: self._state_of(process) for rank, process in self.everyone.items()}
        # In a run that is over, a rank without an end record is gone: no more records are expected.
        over = State.RUNNING not in found.values() and not {State.DONE, State.FAILED}.isdisjoint(found.values())
        return {rank: State.GONE if over and each is State.SILENT else each for rank, each in found.items()}

    @cached_property
    def state(self) -> State:
        """State of the job: running while any rank runs, failed if none runs and one ended with an error."""
        states = set(self.states.values())
        for each in (State.RUNNING, State.SILENT, State.FAILED, State.DONE, State.LEFT, State.GONE):
            if each in states:
                return each
        return State.EMPTY

    @cached_property
    def live(self) -> dict[int, Process]:
        """Running processes by rank; if none runs, all processes."""
        found = {rank: each for rank, each in self.everyone.items() if self.states[rank] is State.RUNNING}
        return found or self.everyone

    @cached_property
    def step_totals(self) -> dict[int, StepTotals]:
        """Totals of each rank: over the last `RECENT_S` while the job runs, otherwise over the whole run."""
        now = self.state is State.RUNNING
        step_totals = {rank: process.now(RECENT_S) if now else process.whole for rank, process in self.live.items()}
        return {rank: totals for rank, totals in step_totals.items() if totals.steps}

    @cached_property
    def breakdowns(self) -> dict[int, StepBreakdown]:
        """Breaks down the mean step of every rank. Waiting counts as waiting for the slowest rank up to the difference
        of their compute times; the rest is waiting for the network.
        """
        longest = max((totals.compute_s / totals.steps for totals in self.step_totals.values()), default=0.0)
        found = {}
        for rank, totals in self.step_totals.items():
            compute, wait = totals.compute_s / totals.steps, totals.wait_s / totals.steps
            behind = min(wait, longest - compute)
            found[rank] = StepBreakdown(compute, behind, wait - behind, totals.view_wait_s / totals.steps)
        return found

    @cached_property
    def slowest(self) -> int | None:
        """The rank that the others wait for; None if there is none."""
        if len(self.breakdowns) < 2 or not any(breakdown.straggler_s > 0.0 for breakdown in self.breakdowns.values()):
            return None
        return max(self.breakdowns, key=lambda rank: self.breakdowns[rank].compute_s)

    @cached_property
    def links(self) -> list[LinkState]:
        """Every direction of every link. The receiver measures loss, the sender everything else."""
        over = self.state is not State.RUNNING
        found = []
        for receiver, at in self.live.items():
            for sender, of in self.live.items():
                if sender != receiver:
                    there, back = at.links.get(sender), of.links.get(receiver)
                    loss = None if there is None else at.mean_loss(sender) if over else there.loss
                    trip = back.rtt_s if back is not None else there.rtt_s if there is not None else None
                    found.append(LinkState(sender, receiver, loss, trip, None if back is None else back.rate))
        return found

    def _state_of(self, process: Process) -> State:
        if process.why is not None:
            return {"done": State.DONE, "left": State.LEFT}.get(process.why, State.FAILED)
        _, last = process.recent[-1] if process.recent else (0.0, StepTotals())
        silence_limit_s = max(_SILENT_S, _SILENT_STEPS * last.seconds / last.steps if last.steps else 0.0)
        silent = self.now - process.arrived > silence_limit_s
        view = self.job.view
        if view is not None and process.rank not in view.members:
            # Compare arrival times: clocks of two ranks may differ by more than a rank needs to rejoin.
            back = not silent and process.arrived > view.arrived + _SILENT_S
            return State.RUNNING if back else State.GONE
        return State.SILENT if silent else State.RUNNING

"""A job at one time: who runs, where the seconds of a step go, and what each link is like."""

from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from stormtorch.watch.job import Job
from stormtorch.watch.process import Process, StepTotals

RECENT_S = 30.0
"""Seconds that count as now: long enough to be smooth, short enough to follow a network that changes."""
# A rank tells something about once a second. One that has missed so many seconds, and so many of its steps where these
# are longer, is silent.
_SILENT_S = 10.0
_SILENT_STEPS = 4.0


class State(StrEnum):
    """Condition of a process or of a job."""

    EMPTY = "empty"
    """Nothing is known of it yet."""
    RUNNING = "running"
    SILENT = "silent"
    """State of a process that has not ended, but has told nothing for a while."""
    GONE = "gone"
    """The others have agreed on a view without it."""
    LEFT = "left"
    """It handed over and left."""
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
    """Where the seconds of one mean step of a rank go."""

    compute_s: float
    straggler_s: float
    """Waiting that goes back to the rank that computes longest."""
    network_s: float
    """Waiting for the network."""
    view_s: float
    """Waiting for views, when ranks come and go."""

    @property
    def step_s(self) -> float:
        """Seconds of the whole step."""
        return sum(self)


class JobSnapshot:
    """A job at one time. Everything is worked out once, when it is first asked for.

    Args:
        job: The job; it must not change meanwhile.
        now: Unix time, by the clock that says when records arrived.
    """

    def __init__(self, job: Job, now: float) -> None:
        self.job, self.now = job, now

    @cached_property
    def everyone(self) -> dict[int, Process]:
        """The latest process of each rank, by rank."""
        return self.job.current

    @cached_property
    def states(self) -> dict[int, State]:
        """Condition of the latest process of each rank."""
        found = {rank: self._state_of(process) for rank, process in self.everyone.items()}
        # Of a run that is over, whoever said nothing at its end is gone: nobody waits for another word.
        over = State.RUNNING not in found.values() and not {State.DONE, State.FAILED}.isdisjoint(found.values())
        return {rank: State.GONE if over and each is State.SILENT else each for rank, each in found.items()}

    @cached_property
    def state(self) -> State:
        """Condition of the job: running while anybody runs, failed if a process ended with an error and none runs."""
        states = set(self.states.values())
        for each in (State.RUNNING, State.SILENT, State.FAILED, State.DONE, State.LEFT, State.GONE):
            if each in states:
                return each
        return State.EMPTY

    @cached_property
    def live(self) -> dict[int, Process]:
        """The processes that run, by rank; all that took part, if none runs."""
        found = {rank: each for rank, each in self.everyone.items() if self.states[rank] is State.RUNNING}
        return found or self.everyone

    @cached_property
    def step_totals(self) -> dict[int, StepTotals]:
        """What counts for each rank: the last half minute while the job runs, the whole run when it is over."""
        now = self.state is State.RUNNING
        step_totals = {rank: process.now(RECENT_S) if now else process.whole for rank, process in self.live.items()}
        return {rank: totals for rank, totals in step_totals.items() if totals.steps}

    @cached_property
    def breakdowns(self) -> dict[int, StepBreakdown]:
        """Splits the mean step of every rank. Waiting goes back to the rank that computes longest as far as that one
        computes longer than the rank itself; the rest of the waiting is the network's.
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
        """The rank that the others wait for; None where nobody waits for one."""
        if len(self.breakdowns) < 2 or not any(breakdown.straggler_s > 0.0 for breakdown in self.breakdowns.values()):
            return None
        return max(self.breakdowns, key=lambda rank: self.breakdowns[rank].compute_s)

    @cached_property
    def links(self) -> list[LinkState]:
        """Every direction of every link between ranks. The receiver measures loss, the sender all else."""
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
            # Judged by arrivals: clocks of two ranks may differ by more than a rank takes to come back.
            back = not silent and process.arrived > view.arrived + _SILENT_S
            return State.RUNNING if back else State.GONE
        return State.SILENT if silent else State.RUNNING

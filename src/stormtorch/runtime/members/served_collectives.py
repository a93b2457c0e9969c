"""Calls that all ranks make: `model.state_dict()`, `exact()` and `optimizer.state_dict()`.

A rank that makes a call tells the others which call it is and at which step. The others may make the same call. Or they
wait for something else, such as backward() or a barrier: then they notice the call and take part in it while they wait,
without any change to their own parameters. So `if rank == 0: torch.save(model.state_dict(), ...)` is exact, and no
other rank has to know of it. If ranks make different calls, all serve calls for the model first, then those for the
optimizer. A rank that is about to leave takes part too, until all others are about to leave, or have begun another step
without it.

A slow rank may take part in a call that it is about to make itself. Therefore it keeps the result until the next step,
and answers its own call from it: the others have their result already, and do not take part again.

An error in a call is raised to the caller. Ranks that only take part log a warning and continue to wait, unless their
models differ in size.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from stormtorch.collectives import Group
from stormtorch.errors import Interrupted, SizeMismatch, StormError
from stormtorch.exchange.waiting import doing, is_elsewhere
from stormtorch.runtime.members.barrier import (
    EXACT_MODEL,
    LEAVES,
    MODEL_STATE,
    NAMES,
    OPTIMIZER_STATE,
    TAKES_PART,
    Meeting,
    Told,
)

__all__ = ["EXACT_MODEL", "MODEL_STATE", "NAMES", "OPTIMIZER_STATE", "Calls"]

_log = logging.getLogger("stormtorch")


@dataclass(slots=True)
class _Kept:
    """The result of calls of one kind, at one step, in which this rank took part for others."""

    steps: int
    times: int
    """Number of such calls that this rank has not made itself since."""
    result: object


class Calls:
    """The calls of one session.

    Args:
        meeting: The place where ranks meet for calls.
        steps: Returns the number of steps that this rank has made.
        ready: Returns whether this rank could take part now.
        going_on: Returns whether this rank waits within a step that it has begun, not for the end of the last one.
        serve: Takes part in a call, given its number. Changes nothing on this rank, and returns the result.
        due: Returns whether another view begins now for this rank, which is between two steps.
        change: Begins that view.
    """

    def __init__(
        self,
        meeting: Meeting,
        *,
        steps: Callable[[], int],
        ready: Callable[[], bool],
        going_on: Callable[[], bool] = lambda: False,
        serve: Callable[[int], object],
        due: Callable[[], bool],
        change: Callable[[], object],
    ) -> None:
        self.meeting = meeting
        self._steps = steps
        self._ready = ready
        self._going_on = going_on
        self._serve = serve
        self._due, self._change = due, change
        self._busy = self._parted = False
        self._kept: dict[bool, _Kept] = {}
        # Only this thread makes steps: others that wait in a collective cannot know whether one is under way.
        self._thread = threading.get_ident()
        meeting.group.transport.servers.offer(self)

    @property
    def group(self) -> Group:
        """Group of the exchanges that follow a meeting."""
        return self.meeting.group

    @contextlib.contextmanager
    def call(self, call: int) -> Iterator[object]:
        """Enters a context in which all ranks take part in a call.

        Yields the result of the call if this rank has already taken part in it, or None.

        Raises:
            StormError: A rank has made another number of steps.
            Interrupted: Another view begins.
            ExchangeTimeout: A rank neither made the call nor took part in it in time.
        """
        kept = self._kept.get(call == OPTIMIZER_STATE)
        if kept is not None and kept.steps == self._steps() and kept.times > 0:
            kept.times -= 1
            yield kept.result
            return
        with doing(NAMES[call]), self.occupied():
            while True:
                found = self.meeting.meet(call, self._steps())
                if found is None:
                    continue  # a rank has given up an earlier call, or has just died
                self._compare(found)
                if _first(found).of_optimizer == (call == OPTIMIZER_STATE):
                    break
                self._answer(found)
            yield None

    def forget(self) -> None:
        """Drops kept results, as parameters or the optimizer's state are about to change."""
        self._kept.clear()

    def awaited(self) -> bool:
        """Whether other ranks have begun a call that this one can take part in now."""
        if self._busy or (is_elsewhere() and threading.get_ident() != self._thread):
            return False
        if self._due():
            return True
        mine, seen = self._steps(), False
        begun = self.meeting.begun()
        if self._all_part(begun):
            return True
        for told in begun:
            if told.call == TAKES_PART:
                continue
            if told.steps < mine:
                return True  # meet it now: a late call must fail, and a rank that leaves may go
            if told.call == LEAVES and not self._going_on():
                continue  # it stays until this rank leaves too
            seen = seen or told.steps == mine  # a rank that is ahead is met later
        return seen and self._ready()

    @torch.no_grad()
    def serve(self) -> None:
        """Takes part in a call that others have begun. An error in it does not disturb what this rank waits for."""
        with self.occupied():
            if self._due():
                self._change()
                return
            if self._all_part(self.meeting.begun()):
                self.part()
                return
            try:
                found = self.meeting.meet(TAKES_PART, self._steps())
            except Interrupted:
                return  # another view begins, for which this rank will be asked
            except StormError as error:
                self._tell(NAMES[TAKES_PART], error)
                return
            if found is not None and _asked(found):
                self._answer(found)

    @torch.no_grad()
    def part(self) -> None:
        """Takes part in the calls of others before this rank leaves, until they leave too or continue without it."""
        if self._parted:
            return
        self._parted = True
        with doing(NAMES[LEAVES]), self.occupied(), contextlib.suppress(StormError):
            while True:
                try:
                    found = self.meeting.meet(LEAVES, self._steps())
                except Interrupted:
                    transport = self.group.transport
                    if not transport.inside() or not self._due() or not transport.standing()["quorum"]:
                        return
                    self._change()
                    continue
                if found is None:
                    continue
                self._compare(found)
                if not _asked(found):
                    return
                self._answer(found)

    def _all_part(self, begun: Sequence[Told]) -> bool:
        """Whether all ranks are about to leave, and the others are met here now.

        Ranks may have dropped different models, as the garbage collector comes when it likes, and so leave their
        sessions in another order, or some that others do not have any more.
        """
        leaving = self.group.transport.servers.parting and not self._parted
        return leaving and len(begun) == self.group.size - 1 and all(told.call == LEAVES for told in begun)

    @contextlib.contextmanager
    def occupied(self) -> Iterator[None]:
        """Enters a context in which this rank takes part in no call, as it is within one or begins an epoch."""
        before, self._busy = self._busy, True
        try:
            yield
        finally:
            self._busy = before

    def _answer(self, found: dict[int, Told]) -> None:
        """Takes part in that call of the others which is served first."""
        first = _first(found)
        try:
            self._compare(found)
            result = self._serve(first.call)
        except Interrupted:
            return
        except SizeMismatch:
            raise  # models differ, so the caller waits for something that this rank cannot give: both must fail
        except StormError as error:
            asking = [peer for peer, told in _asked(found).items() if told.of_optimizer == first.of_optimizer]
            self._tell(f"{NAMES[first.call]} of rank {', '.join(map(str, asking))}", error)
            return
        if is_elsewhere():
            return  # this rank waits in a collective that comes after this call, so a call of its own is another one
        kept = self._kept.get(first.of_optimizer)
        times = kept.times if kept is not None and kept.steps == self._steps() else 0
        self._kept[first.of_optimizer] = _Kept(self._steps(), times + 1, result)

    def _tell(self, what: str, error: StormError) -> None:
        rank = self.group.rank
        why = str(error).removeprefix(f"rank {rank}: ")
        _log.warning("rank %d: takes no part in %s, and goes on without it: %s", rank, what, why)

    def _compare(self, found: dict[int, Told]) -> None:
        for first, leader in _asked(found).items():
            for peer, told in found.items():
                if told.steps != leader.steps:
                    raise StormError(
                        f"rank {self.group.rank}: rank {first} has called {NAMES[leader.call]} after {leader.steps} "
                        f"steps, and rank {peer} has made {told.steps}: call it on every rank, or between step() and "
                        "the next backward()"
                    )


def _asked(found: dict[int, Told]) -> dict[int, Told]:
    """Returns what the ranks that make a call have told; the others only take part."""
    return {peer: told for peer, told in found.items() if told.asks}


def _first(found: dict[int, Told]) -> Told:
    """Returns the call that is served first, of those that ranks make; the same on all ranks."""
    return min(_asked(found).values())

"""Calls that all ranks make: `model.state_dict()`, `exact()` and `optimizer.state_dict()`.

A rank that makes one tells the others which, and at which step it is. The others may make the same call. Or they wait
for something else, in backward() or in a barrier, say: then they see what was begun and take part in it from there, as
if they had made the call, without any change to what they have. So `if rank == 0: torch.save(model.state_dict(), ...)`
is exact, and no other rank has to know of it. If they make another call, all serve the model's first, then the
optimizer's. A rank that is about to leave takes part as well, until all others are about to leave too, or have begun
another step without it.

A slow rank may take part in a call that it is about to make itself. So what it got is kept until the next step, and its
own call is answered from there: the others have theirs, and do not come again.

An error in a call is the caller's. Ranks that only take part log a warning, and go on with what they wait for, unless
their models differ in size.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from stormtorch.collectives import Group
from stormtorch.errors import SizeMismatch, StormError
from stormtorch.runtime.meeting import (
    EXACT_MODEL,
    LEAVES,
    MODEL_STATE,
    NAMES,
    OPTIMIZER_STATE,
    TAKES_PART,
    Meeting,
    Told,
)
from stormtorch.transport.waiting import doing, is_elsewhere

__all__ = ["EXACT_MODEL", "MODEL_STATE", "NAMES", "OPTIMIZER_STATE", "Calls"]

_log = logging.getLogger("stormtorch")


@dataclass(slots=True)
class _Kept:
    """What came of calls that this rank has only taken part in, of one kind and at one step."""

    steps: int
    times: int
    """Calls that this rank has not made itself since."""
    present: list[int]
    result: object


class Calls:
    """The calls of one training.

    Args:
        meeting: Where ranks meet for them.
        steps: Tells how many this rank has made.
        ready: Whether this rank could take part now.
        going_on: Whether this rank waits for others in a step that it has begun, and not for the end of the last one.
        serve: Takes part in a call, by number, with the ranks that are there, changes nothing here, and returns what
            came of it.
    """

    def __init__(
        self,
        meeting: Meeting,
        *,
        steps: Callable[[], int],
        ready: Callable[[], bool],
        going_on: Callable[[], bool] = lambda: False,
        serve: Callable[[int, list[int]], object],
    ) -> None:
        self.meeting = meeting
        self._steps = steps
        self._ready = ready
        self._going_on = going_on
        self._serve = serve
        self._busy = False
        self._kept: dict[bool, _Kept] = {}
        # Other threads that wait in a collective cannot know whether a step is being made.
        self._thread = threading.get_ident()
        meeting.group.transport.servers.offer(self)

    @property
    def group(self) -> Group:
        """Who takes part in what follows a meeting."""
        return self.meeting.group

    @contextlib.contextmanager
    def call(self, call: int) -> Iterator[tuple[list[int], object]]:
        """Within it, all ranks take part in a call.

        Gives the ranks that are there, and what came of the call if this rank has taken part in it before.

        Raises:
            StormError: A rank has made another number of steps.
            ExchangeTimeout: A rank has not come.
        """
        kept = self._kept.get(call == OPTIMIZER_STATE)
        if kept is not None and kept.steps == self._steps() and kept.times > 0:
            kept.times -= 1
            yield kept.present, kept.result
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
            yield sorted(found), None

    def forget(self) -> None:
        """Drops what was kept: parameters or the optimizer's state are about to change."""
        self._kept.clear()

    def awaited(self) -> bool:
        """Whether other ranks have begun a call that this one can take part in now."""
        if self._busy or (is_elsewhere() and threading.get_ident() != self._thread):
            return False
        mine, seen = self._steps(), False
        for told in self.meeting.begun():
            if told.call == TAKES_PART:
                continue
            if told.steps < mine:
                return True  # it comes too late and is told so, or leaves and may go: it has nothing that is asked for
            if told.call == LEAVES and not self._going_on():
                continue  # it may stay until this rank leaves too
            seen = seen or told.steps == mine  # who is ahead is met later
        return seen and self._ready()

    @torch.no_grad()
    def serve(self) -> None:
        """Takes part in a call that others have begun. What goes wrong in it does not end what this rank waits for."""
        with self.occupied():
            try:
                found = self.meeting.meet(TAKES_PART, self._steps())
            except StormError as error:
                self._tell(NAMES[TAKES_PART], error)
                return
            if found is not None and _asked(found):
                self._answer(found)

    @torch.no_grad()
    def part(self) -> None:
        """Takes part in what others still call for, until they leave too, or go on without this rank."""
        with doing(NAMES[LEAVES]), self.occupied(), contextlib.suppress(StormError):
            while True:
                found = self.meeting.meet(LEAVES, self._steps())
                if found is None:
                    continue
                self._compare(found)
                if not _asked(found):
                    return
                self._answer(found)

    @contextlib.contextmanager
    def occupied(self) -> Iterator[None]:
        """Within it, this rank's waits are part of a call, or of the beginning of an epoch: it takes part in none."""
        before, self._busy = self._busy, True
        try:
            yield
        finally:
            self._busy = before

    def _answer(self, found: dict[int, Told]) -> None:
        """Takes part in the first call of those that others make."""
        first, present = _first(found), sorted(found)
        try:
            self._compare(found)
            result = self._serve(first.call, present)
        except SizeMismatch:
            raise  # models differ, and the caller waits for what this rank cannot give: it must not go on in silence
        except StormError as error:
            asking = [peer for peer, told in _asked(found).items() if told.of_optimizer == first.of_optimizer]
            self._tell(f"{NAMES[first.call]} of rank {', '.join(map(str, asking))}", error)
            return
        if is_elsewhere():
            return  # the collective that this rank waits in comes after this call, and its own call after that
        kept = self._kept.get(first.of_optimizer)
        times = kept.times if kept is not None and kept.steps == self._steps() else 0
        self._kept[first.of_optimizer] = _Kept(self._steps(), times + 1, present, result)

    def _tell(self, what: str, error: StormError) -> None:
        rank = self.group.rank
        why = str(error).removeprefix(f"rank {rank}: ")
        _log.warning("rank %d: takes no part in %s, and goes on without: %s", rank, what, why)

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
    """What ranks ask for; the others only take part."""
    return {peer: told for peer, told in found.items() if told.asks}


def _first(found: dict[int, Told]) -> Told:
    """The call that is served first, of those that ranks make: the same on all of them."""
    return min(_asked(found).values())

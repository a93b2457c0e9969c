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
from stormtorch.exchange.waiting import in_call, is_elsewhere
from stormtorch.runtime.members.barrier import (
    EXACT_MODEL,
    LEAVES,
    MODEL_STATE,
    NAMES,
    OPTIMIZER_STATE,
    SERVES_ONLY,
    Barrier,
    BarrierMessage,
)

__all__ = ["EXACT_MODEL", "MODEL_STATE", "NAMES", "OPTIMIZER_STATE", "ServedCollectives"]

_log = logging.getLogger("stormtorch")


@dataclass(slots=True)
class _CachedResult:
    """The result of calls of one kind, at one step, in which this rank took part for others."""

    steps: int
    times: int
    """Number of such calls that this rank has not made itself since."""
    result: object


class ServedCollectives:
    """The calls of one session.

    Args:
        meeting: The place where ranks meet for calls.
        steps: Returns the number of steps that this rank has made.
        ready: Returns whether this rank could take part now.
        mid_step: Returns whether this rank waits within a step that it has begun, not for the end of the last one.
        serve: Takes part in a call, given its number. Changes nothing on this rank, and returns the result.
        due: Returns whether another view begins now for this rank, which is between two steps.
        change: Begins that view.
    """

    def __init__(
        self,
        barrier: Barrier,
        *,
        steps: Callable[[], int],
        ready: Callable[[], bool],
        mid_step: Callable[[], bool] = lambda: False,
        serve: Callable[[int], object],
        due: Callable[[], bool],
        change: Callable[[], object],
    ) -> None:
        self.barrier = barrier
        self._steps = steps
        self._ready = ready
        self._mid_step = mid_step
        self._serve = serve
        self._due, self._change = due, change
        self._busy = self._has_left = False
        self._cached: dict[bool, _CachedResult] = {}
        # Only this thread makes steps: others that wait in a collective cannot know whether one is under way.
        self._thread = threading.get_ident()
        barrier.group.transport.collective_servers.offer(self)

    @property
    def group(self) -> Group:
        """Group of the exchanges that follow a meeting."""
        return self.barrier.group

    @contextlib.contextmanager
    def call(self, call: int) -> Iterator[object]:
        """Enters a context in which all ranks take part in a call.

        Yields the result of the call if this rank has already taken part in it, or None.

        Raises:
            StormError: A rank has made another number of steps.
            Interrupted: Another view begins.
            ExchangeTimeout: A rank neither made the call nor took part in it in time.
        """
        cached = self._cached.get(call == OPTIMIZER_STATE)
        if cached is not None and cached.steps == self._steps() and cached.times > 0:
            cached.times -= 1
            yield cached.result
            return
        with in_call(NAMES[call]), self.serving_paused():
            while True:
                found = self.barrier.wait_for_all(call, self._steps())
                if found is None:
                    continue  # a rank has given up an earlier call, or has just died
                self._compare(found)
                if _first(found).of_optimizer == (call == OPTIMIZER_STATE):
                    break
                self._serve_first(found)
            yield None

    def forget(self) -> None:
        """Drops kept results, as parameters or the optimizer's state are about to change."""
        self._cached.clear()

    def requested(self) -> bool:
        """Whether other ranks have begun a call that this one can take part in now."""
        if self._busy or (is_elsewhere() and threading.get_ident() != self._thread):
            return False
        if self._due():
            return True
        mine, seen = self._steps(), False
        pending_messages = self.barrier.pending_messages()
        if self._all_leave(pending_messages):
            return True
        for message in pending_messages:
            if message.call == SERVES_ONLY:
                continue
            if message.steps < mine:
                return True  # meet it now: a late call must fail, and a rank that leaves may go
            if message.call == LEAVES and not self._mid_step():
                continue  # it stays until this rank leaves too
            seen = seen or message.steps == mine  # a rank that is ahead is met later
        return seen and self._ready()

    @torch.no_grad()
    def serve(self) -> None:
        """Takes part in a call that others have begun. An error in it does not disturb what this rank waits for."""
        with self.serving_paused():
            if self._due():
                self._change()
                return
            if self._all_leave(self.barrier.pending_messages()):
                self.drain()
                return
            try:
                found = self.barrier.wait_for_all(SERVES_ONLY, self._steps())
            except Interrupted:
                return  # another view begins, for which this rank will be asked
            except StormError as error:
                self._warn_skipped(NAMES[SERVES_ONLY], error)
                return
            if found is not None and _requests(found):
                self._serve_first(found)

    @torch.no_grad()
    def drain(self) -> None:
        """Takes part in the calls of others before this rank leaves, until they leave too or continue without it."""
        if self._has_left:
            return
        self._has_left = True
        with in_call(NAMES[LEAVES]), self.serving_paused(), contextlib.suppress(StormError):
            while True:
                try:
                    found = self.barrier.wait_for_all(LEAVES, self._steps())
                except Interrupted:
                    transport = self.group.transport
                    if not transport.inside() or not self._due() or not transport.connectivity()["quorum"]:
                        return
                    self._change()
                    continue
                if found is None:
                    continue
                self._compare(found)
                if not _requests(found):
                    return
                self._serve_first(found)

    def _all_leave(self, pending_messages: Sequence[BarrierMessage]) -> bool:
        """Whether all ranks are about to leave, and the others are met here now.

        Ranks may have dropped different models, as the garbage collector comes when it likes, and so leave their
        sessions in another order, or some that others do not have any more.
        """
        leaving = self.group.transport.collective_servers.draining and not self._has_left
        return (
            leaving
            and len(pending_messages) == self.group.size - 1
            and all(message.call == LEAVES for message in pending_messages)
        )

    @contextlib.contextmanager
    def serving_paused(self) -> Iterator[None]:
        """Enters a context in which this rank takes part in no call, as it is within one or begins an epoch."""
        before, self._busy = self._busy, True
        try:
            yield
        finally:
            self._busy = before

    def _serve_first(self, found: dict[int, BarrierMessage]) -> None:
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
            requesting = [
                peer for peer, message in _requests(found).items() if message.of_optimizer == first.of_optimizer
            ]
            self._warn_skipped(f"{NAMES[first.call]} of rank {', '.join(map(str, requesting))}", error)
            return
        if is_elsewhere():
            return  # this rank waits in a collective that comes after this call, so a call of its own is another one
        cached = self._cached.get(first.of_optimizer)
        times = cached.times if cached is not None and cached.steps == self._steps() else 0
        self._cached[first.of_optimizer] = _CachedResult(self._steps(), times + 1, result)

    def _warn_skipped(self, what: str, error: StormError) -> None:
        rank = self.group.rank
        why = str(error).removeprefix(f"rank {rank}: ")
        _log.warning("rank %d: takes no part in %s, and goes on without it: %s", rank, what, why)

    def _compare(self, found: dict[int, BarrierMessage]) -> None:
        for first, leader in _requests(found).items():
            for peer, message in found.items():
                if message.steps != leader.steps:
                    raise StormError(
                        f"rank {self.group.rank}: rank {first} has called {NAMES[leader.call]} after {leader.steps} "
                        f"steps, and rank {peer} has made {message.steps}: call it on every rank, or between step() and "
                        "the next backward()"
                    )


def _requests(found: dict[int, BarrierMessage]) -> dict[int, BarrierMessage]:
    """Returns what the ranks that make a call have told; the others only take part."""
    return {peer: message for peer, message in found.items() if message.is_request}


def _first(found: dict[int, BarrierMessage]) -> BarrierMessage:
    """Returns the call that is served first, of those that ranks make; the same on all ranks."""
    return min(_requests(found).values())

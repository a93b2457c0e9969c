"""Collectives served while a rank blocks: `model.state_dict()`, `exact()` and `optimizer.state_dict()`.

A rank that makes such a call announces which call it is and at which step. The other ranks make the same call, or they
block elsewhere, as in backward() or a barrier. A blocked rank notices the call and serves it while it waits, without
changing its own parameters. So `if rank == 0: torch.save(model.state_dict(), ...)` gives an exact checkpoint without
code on the other ranks. If ranks make different calls, all of them serve calls for the model first, then those for the
optimizer. A leaving rank also serves calls, until all other ranks leave or have begun another step without it.

A slow rank may serve a call that it is about to make itself. It therefore caches the result until its next step and
returns it from its own call: the other ranks have their result already and do not take part again.

An error in a call is raised on the ranks that made it. Ranks that only serve it log a warning and keep waiting, unless
the models differ in size.
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
    """The result of calls of one kind, at one step, that this rank served."""

    steps: int
    times: int
    """How many of them this rank has not made itself yet."""
    result: object


class ServedCollectives:
    """Makes and serves the calls of one session.

    Args:
        barrier: Barrier that ranks enter before a call.
        steps: Returns the number of steps that this rank has made.
        ready: Returns whether this rank can serve a call now.
        mid_step: Returns whether this rank waits within a step that it has begun, not for the end of the last one.
        serve: Serves a call, given its number, and returns the result. It changes nothing on this rank.
        due: Returns whether this rank, between two steps, must apply another view now.
        change: Applies that view.
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
        # Only this thread makes steps: another thread in a collective cannot tell whether a step is running.
        self._thread = threading.get_ident()
        barrier.group.transport.collective_servers.offer(self)

    @property
    def group(self) -> Group:
        """Group of the exchanges that follow the barrier."""
        return self.barrier.group

    @contextlib.contextmanager
    def call(self, call: int) -> Iterator[object]:
        """Enters a context in which all ranks take part in a call.

        Yields the cached result if this rank has already served the call, or None.

        Raises:
            StormError: A rank has made another number of steps.
            Interrupted: Another view begins.
            ExchangeTimeout: A rank neither made nor served the call in time.
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
                    continue  # a rank timed out in an earlier call, or has just died
                self._compare(found)
                if _first(found).of_optimizer == (call == OPTIMIZER_STATE):
                    break
                self._serve_first(found)
            yield None

    def forget(self) -> None:
        """Drops cached results, because parameters or the optimizer's state are about to change."""
        self._cached.clear()

    def requested(self) -> bool:
        """Whether other ranks have started a call that this rank can serve now."""
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
                return True  # enter the barrier now: a late call must fail, and a leaving rank may exit
            if message.call == LEAVES and not self._mid_step():
                continue  # it stays until this rank leaves too
            seen = seen or message.steps == mine  # a rank that is ahead is served later
        return seen and self._ready()

    @torch.no_grad()
    def serve(self) -> None:
        """Serves a call that other ranks have started. An error in it does not end what this rank waits for."""
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
                return  # another view begins; `due` will report it
            except StormError as error:
                self._warn_skipped(NAMES[SERVES_ONLY], error)
                return
            if found is not None and _requests(found):
                self._serve_first(found)

    @torch.no_grad()
    def drain(self) -> None:
        """Serves calls before this rank leaves, until the other ranks leave too or continue without it."""
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
        """Whether all ranks are leaving and all others wait in this session's barrier.

        Garbage collection may have dropped different models on different ranks. Ranks then leave their sessions in
        different orders, or leave sessions that other ranks no longer have.
        """
        leaving = self.group.transport.collective_servers.draining and not self._has_left
        return (
            leaving
            and len(pending_messages) == self.group.size - 1
            and all(message.call == LEAVES for message in pending_messages)
        )

    @contextlib.contextmanager
    def serving_paused(self) -> Iterator[None]:
        """Enters a context in which this rank serves no call, because it is in one or applies a view."""
        before, self._busy = self._busy, True
        try:
            yield
        finally:
            self._busy = before

    def _serve_first(self, found: dict[int, BarrierMessage]) -> None:
        """Serves the first of the calls that other ranks have started."""
        first = _first(found)
        try:
            self._compare(found)
            result = self._serve(first.call)
        except Interrupted:
            return
        except SizeMismatch:
            raise  # models differ, so this rank cannot send what the caller waits for: both must fail
        except StormError as error:
            requesting = [
                peer for peer, message in _requests(found).items() if message.of_optimizer == first.of_optimizer
            ]
            self._warn_skipped(f"{NAMES[first.call]} of rank {', '.join(map(str, requesting))}", error)
            return
        if is_elsewhere():
            return  # this rank waits in a collective after this call, so its own next call is another one
        cached = self._cached.get(first.of_optimizer)
        times = cached.times if cached is not None and cached.steps == self._steps() else 0
        self._cached[first.of_optimizer] = _CachedResult(self._steps(), times + 1, result)

    def _warn_skipped(self, what: str, error: StormError) -> None:
        rank = self.group.rank
        why = str(error).removeprefix(f"rank {rank}: ")
        _log.warning("rank %d: takes no part in %s, and continues without it: %s", rank, what, why)

    def _compare(self, found: dict[int, BarrierMessage]) -> None:
        for first, leader in _requests(found).items():
            for peer, message in found.items():
                if message.steps != leader.steps:
                    raise StormError(
                        f"rank {self.group.rank}: rank {first} has called {NAMES[leader.call]} after {leader.steps} "
                        f"steps, and rank {peer} has made {message.steps}: call it on every rank, or between step() "
                        "and the next backward()"
                    )


def _requests(found: dict[int, BarrierMessage]) -> dict[int, BarrierMessage]:
    """Returns the messages of ranks that make a call, without those that only serve or leave."""
    return {peer: message for peer, message in found.items() if message.is_request}


def _first(found: dict[int, BarrierMessage]) -> BarrierMessage:
    """Returns the message of the call to serve first, the same on all ranks."""
    return min(_requests(found).values())

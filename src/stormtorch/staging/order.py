"""Collectives begin in the order of the calls, also where the data of one has yet to leave a GPU."""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Protocol

import torch

from stormtorch.staging.threads import run_soon


class Started(Protocol):
    """Something under way, as a `Pending` is."""

    @property
    def exchanges(self) -> int:
        """Of how many it consists, one after the other."""
        ...

    @property
    def ended(self) -> bool:
        """Whether `wait` would return at once, as far as is known without looking."""
        ...

    def done(self) -> bool:
        """Whether it has ended, so that `wait` does not block."""
        ...

    def wait(self, timeout_s: float | None = None) -> object:
        """Blocks until it has ended."""
        ...


Begin = Callable[[], Sequence[Started]]


class Moment(Protocol):
    """Something that can be waited for, as a CUDA event can."""

    def synchronize(self) -> None:
        """Blocks until it has happened."""
        ...


class Order:
    """One group's queue. Where nothing has to be waited for, a collective begins at once, in the caller's thread."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._queue: deque[tuple[Future[Sequence[Started]], Callable[[], None]]] = deque()
        self._beginning: Future[Sequence[Started]] | None = None
        self._draining = False

    def begin(self, begin: Begin, moments: Sequence[Moment]) -> "Future[Sequence[Started]] | Sequence[Started]":
        """Calls `begin` after what came before it and after the moments; returns at once."""
        with self._lock:
            if not moments and not self._draining:
                return begin()
            future: Future[Sequence[Started]] = Future()
            inference = torch.is_inference_mode_enabled()

            def task() -> None:
                try:
                    for moment in moments:
                        moment.synchronize()
                    with torch.inference_mode(inference):
                        started = begin()
                except BaseException as error:
                    self._settle(future, error=error)
                else:
                    self._settle(future, started)

            self._queue.append((future, task))
            if not self._draining:
                self._draining = True
                run_soon(self._drain)
            return future

    def flush(self) -> None:
        """Blocks until all that was asked for has begun."""
        with self._lock:
            self._lock.wait_for(lambda: not self._draining)

    def abandon(self, error: Exception) -> None:
        """What has not begun will not: whoever waits for it gets the error."""
        with self._lock:
            waiting = [future for future, _ in self._queue] + ([self._beginning] if self._beginning else [])
            self._queue.clear()
        for future in waiting:
            self._settle(future, error=error)

    def _settle(
        self, future: "Future[Sequence[Started]]", started: Sequence[Started] = (), error: BaseException | None = None
    ) -> None:
        with contextlib.suppress(InvalidStateError):  # it was abandoned, or has just been
            if error is None:
                future.set_result(started)
            else:
                future.set_exception(error)

    def _drain(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._draining, self._beginning = False, None
                    self._lock.notify_all()
                    return
                self._beginning, task = self._queue.popleft()
            task()

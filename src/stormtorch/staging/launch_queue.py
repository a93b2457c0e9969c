"""Launch queue: starts collectives in the order of the calls, even if the data of one is still on its GPU."""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Protocol

import torch

from stormtorch.staging.threads import run_soon


class StartedWork(Protocol):
    """Started operation, such as a `stormtorch.collectives.Pending`."""

    @property
    def exchanges(self) -> int:
        """Number of exchanges that it makes, one after the other."""
        ...

    @property
    def ended(self) -> bool:
        """Whether the collective is already known to have ended, without polling the transport."""
        ...

    def done(self) -> bool:
        """Whether it has ended, so that `wait` would not block."""
        ...

    def wait(self, timeout_s: float | None = None) -> object:
        """Blocks until it has ended."""
        ...


Begin = Callable[[], Sequence[StartedWork]]


class Event(Protocol):
    """Something to wait for, such as a CUDA event."""

    def synchronize(self) -> None:
        """Blocks until it has happened."""
        ...


class LaunchQueue:
    """Queue of one group. A collective that has nothing to wait for starts at once, in the caller's thread."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._queue: deque[tuple[Future[Sequence[StartedWork]], Callable[[], None]]] = deque()
        self._beginning: Future[Sequence[StartedWork]] | None = None
        self._draining = False

    def begin(self, begin: Begin, events: Sequence[Event]) -> "Future[Sequence[StartedWork]] | Sequence[StartedWork]":
        """Calls `begin` after all earlier calls and after the events. Returns without waiting for either."""
        with self._lock:
            if not events and not self._draining:
                return begin()
            future: Future[Sequence[StartedWork]] = Future()
            inference = torch.is_inference_mode_enabled()

            def task() -> None:
                try:
                    for moment in events:
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
        """Blocks until every collective in the queue has started."""
        with self._lock:
            self._lock.wait_for(lambda: not self._draining)

    def abort(self, error: Exception) -> None:
        """Drops every collective that has not started; threads that wait for one get the error."""
        with self._lock:
            waiting = [future for future, _ in self._queue] + ([self._beginning] if self._beginning else [])
            self._queue.clear()
        for future in waiting:
            self._settle(future, error=error)

    def _settle(
        self,
        future: "Future[Sequence[StartedWork]]",
        started: Sequence[StartedWork] = (),
        error: BaseException | None = None,
    ) -> None:
        with contextlib.suppress(InvalidStateError):  # `abort` has completed it already
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

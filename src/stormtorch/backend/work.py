"""A collective under way, as torch.distributed sees it."""

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from stormtorch.backend.anybody import Taking
from stormtorch.collectives import Pending
from stormtorch.errors import ExchangeTimeout

Finish = Callable[[], None]
"""What remains to be done with the results once they are there: copies into tensors that are not contiguous."""


class StormWork(dist.Work):
    """Some exchanges and what follows them. Whoever waits drives the engine; a future has a thread of the pool."""

    def __init__(
        self,
        what: str,
        pending: Sequence[Pending | Taking],
        results: Sequence[torch.Tensor],
        finish: Finish | None = None,
        failed: Callable[[BaseException], None] | None = None,
        source: Callable[[], int | None] | None = None,
    ) -> None:
        super().__init__()
        self.what = what
        self._pending = list(pending)
        self._results = list(results)
        self._finish = finish
        self._failed = failed
        self._source = source
        self._lock = threading.Lock()
        self._done = False
        self._error: BaseException | None = None
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until it is done.

        Raises:
            StormError: It did not end well; the message names rank, peer, operation and what is missing.
        """
        seconds = timeout.total_seconds() if timeout is not None and timeout > timedelta(0) else None
        if not self._lock.acquire(timeout=-1 if seconds is None else seconds):
            raise ExchangeTimeout(f"{self.what}: not done after {seconds:g} s of waiting")
        try:
            if not self._done:
                self._run(seconds)
            if self._error is not None:
                raise self._error
        finally:
            self._lock.release()
        return True

    def drive(self) -> None:
        """Has a thread of the pool wait, for what would otherwise stand still until the user does.

        Ranks may wait for several collectives in different orders: each would stand between two exchanges of the one
        that the other waits for.
        """
        run_soon(self._wait_quietly)

    def _wait_quietly(self) -> None:
        with contextlib.suppress(Exception):  # `wait` raises it again
            self.wait()

    def _run(self, seconds: float | None) -> None:
        try:
            for each in self._pending:
                each.wait(seconds)
            if self._finish is not None:
                self._finish()
        except ExchangeTimeout as error:
            if seconds is not None and not all(each.ended for each in self._pending):
                raise  # only this waiting took too long; the collective goes on
            self._end(error)
        except Exception as error:
            self._end(error)
        else:
            self._end(None)

    def _end(self, error: BaseException | None) -> None:
        self._done, self._error = True, error
        self._pending.clear()
        if error is not None and self._failed is not None:
            self._failed(error)

    def is_completed(self) -> bool:
        """Whether it is done, well or not. Never blocks."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if not self._done and all(each.done() for each in self._pending):
                self._run(None)
            return self._done
        finally:
            self._lock.release()

    def is_success(self) -> bool:
        """Whether it is done and went well."""
        return self.is_completed() and self._error is None

    def exception(self) -> Any:
        """The error it ended with, or None."""
        return self._error

    def synchronize(self) -> None:
        """The same as `wait`: there is no stream to wait for."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """The tensors that hold the results."""
        return self._results

    def source_rank(self) -> int:
        """Of a receive that has ended, whose it was; -1 otherwise."""
        found = None if self._source is None else self._source()
        return -1 if found is None else found

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future with the results, completed by a thread that may itself wait for other collectives."""
        if self._future is None:
            root: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
            # An exception set on a future that C++ holds ends the process; one that a callback raises does not.
            self._future = root.then(self._value)
            run_soon(lambda: self._complete(root))
        return self._future

    def _complete(self, root: "torch.futures.Future[list[torch.Tensor]]") -> None:
        try:
            self.wait()
        except BaseException as error:
            self._error = error
        root.set_result(self._results)

    def _value(self, _root: "torch.futures.Future[list[torch.Tensor]]") -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return self._results


class _Pool:
    """Threads that complete futures: as many as wait at once, as a callback may wait for a later collective."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0

    def run(self, task: Callable[[], None]) -> None:
        with self._lock:
            if self._idle > 0:
                self._idle -= 1
            else:
                threading.Thread(target=self._work, name="storm-futures", daemon=True).start()
        self._tasks.put(task)

    def _work(self) -> None:
        while True:
            task = self._tasks.get()
            task()
            del task  # it holds tensors
            with self._lock:
                self._idle += 1


_pool = _Pool()


def run_soon(task: Callable[[], None]) -> None:
    """Runs a task on a thread that nobody else needs."""
    _pool.run(task)

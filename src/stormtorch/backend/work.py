"""`Work` of torch.distributed: a started collective, its wait, its future and its error."""

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from stormtorch.backend import native_future
from stormtorch.backend.tensors import Staged
from stormtorch.errors import Closed, ExchangeTimeout
from stormtorch.exchange.waiting import in_call
from stormtorch.staging.launch_queue import StartedWork
from stormtorch.staging.threads import run_soon

Begun = Sequence[StartedWork] | futures.Future[Sequence[StartedWork]]
"""Exchanges of a collective, or a future of them if it has yet to begin."""


class StormWork(dist.Work):
    """The exchanges of one collective, and the copies that follow them.

    The thread that calls `wait` starts one exchange after the other. For a future, a background thread does.
    """

    def __init__(
        self,
        what: str,
        begun: Begun,
        results: Sequence[torch.Tensor],
        staged: Staged,
        finish: Callable[[], None] | None = None,
        ended: Callable[[BaseException | None], None] | None = None,
        source: Callable[[], int | None] | None = None,
        value: Sequence[Sequence[torch.Tensor]] | None = None,
    ) -> None:
        super().__init__()
        self.what = what
        self._begun = begun
        self._results = list(results)
        # The future's value is the same as gloo's: the results, or lists of them for a call with lists of lists.
        self._value: list[Any] = self._results if value is None else [list(each) for each in value]
        self.staged = staged
        self._finish = finish
        self._on_end = ended
        self._source = source
        # Background threads do not inherit inference mode.
        self._inference = torch.is_inference_mode_enabled()
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._done = False
        self._error: BaseException | None = None
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until the results have arrived.

        Raises:
            StormError: The collective failed; the message names rank, peer, operation and what is missing.
        """
        self._check_owner()
        with in_call(f"torch.distributed's {self.what}", elsewhere=True):
            return self._wait(timeout)

    def _wait(self, timeout: timedelta | None = None) -> bool:
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
        self.staged.join()
        return True

    def _check_owner(self) -> None:
        # Check before taking the lock: in a forked process, a thread of the parent may have held it.
        if os.getpid() != self._owner:
            raise Closed(
                f"{self.what}: process {os.getpid()} was forked from process {self._owner}, which started this "
                "collective: wait for it there"
            )

    def drive_in_background(self) -> None:
        """Starts a background wait if the collective makes several exchanges.

        The next exchange starts only while a thread waits. Ranks may wait for two collectives in different orders:
        without this, each would wait for one whose next exchange the other has not started.
        """
        if isinstance(self._begun, futures.Future):
            self._begun.add_done_callback(lambda begun: None if begun.exception() else self._drive(begun.result()))
        else:
            self._drive(self._begun)

    def _drive(self, started: Sequence[StartedWork]) -> None:
        if any(each.exchanges > 1 for each in started):
            run_soon(self._wait_quietly)

    def _wait_quietly(self) -> None:
        with self._on_own_streams(), contextlib.suppress(Exception):  # `wait` will raise the error again
            self._wait()

    def _on_own_streams(self) -> contextlib.AbstractContextManager[object]:
        for device in self.staged.devices:
            torch.cuda.set_device(device)  # a new thread is on GPU 0 and would initialise that one too
        return self.staged.on_streams()

    def _run(self, seconds: float | None) -> None:
        pending: Sequence[StartedWork] = ()
        try:
            with torch.inference_mode(self._inference):
                pending = self._begun.result(seconds) if isinstance(self._begun, futures.Future) else self._begun
                for each in pending:
                    each.wait(seconds)
                self.staged.finish()
                if self._finish is not None:
                    self._finish()
        except TimeoutError as error:
            if seconds is not None and not (pending and all(each.ended for each in pending)):
                # Only this wait timed out; the collective goes on.
                raise ExchangeTimeout(str(error) or f"{self.what} has not begun after {seconds:g} s") from error
            self._end(error)
        except Exception as error:
            self._end(error)
        else:
            self._end(None)

    def _end(self, error: BaseException | None) -> None:
        self._done, self._error = True, error
        self._begun = ()
        if self._on_end is not None:
            self._on_end(error)

    def is_completed(self) -> bool:
        """Whether the collective has ended, well or not. Never blocks."""
        self._check_owner()
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if not self._done and self._ended():
                self._run(None)
            return self._done
        finally:
            self._lock.release()

    @property
    def ended(self) -> bool:
        """Whether the collective is already known to have ended, without polling the transport."""
        return self._done

    def _ended(self) -> bool:
        with torch.inference_mode(self._inference):
            return self._look()

    def _look(self) -> bool:
        if not isinstance(self._begun, futures.Future):
            return all(each.done() for each in self._begun)
        if not self._begun.done():
            return False
        return self._begun.exception() is not None or all(each.done() for each in self._begun.result())

    def is_success(self) -> bool:
        """Whether the collective has ended without an error."""
        return self.is_completed() and self._error is None

    def exception(self) -> Any:
        """Returns the error that the collective ended with, or None."""
        return self._error

    def synchronize(self) -> None:
        """Waits, as `wait` does."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """Returns the tensors that hold the results."""
        return self._results

    def source_rank(self) -> int:
        """Returns the sender of a receive that has ended; -1 otherwise."""
        found = None if self._source is None else self._source()
        return -1 if found is None else found

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Returns a future of the results. Its callbacks may wait for other collectives."""
        for_native = native_future.wanted(self._results)
        if self._future is None:
            root: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=[*self.staged.devices])
            # Raise errors in a callback: an exception set on a future that C++ holds would end the process.
            self._future = root.then(self._conclude)
            run_soon(lambda: self._complete(root, for_native))
        return native_future.readable(self._future, self._results) if for_native else self._future

    def _complete(self, root: "torch.futures.Future[list[torch.Tensor]]", for_native: bool) -> None:
        # On a GPU, a waiter of the future waits for the stream on which it was completed.
        with self._on_own_streams():
            try:
                self._wait()
            except BaseException as error:
                self._error = error
            if for_native:
                for device in self.staged.devices:
                    torch.cuda.current_stream(device).synchronize()  # TorchScript's futures ignore streams
            root.set_result(self._value)

    def _conclude(self, _root: "torch.futures.Future[list[torch.Tensor]]") -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return self._value

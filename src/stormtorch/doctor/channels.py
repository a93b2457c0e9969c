"""RPC channels between the director and the workers: the pipes of a command such as ssh, or a store.

Both carry one request and one answer at a time, as JSON.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

MARK = "stormtorch-doctor "
"""Prefix of lines that are answers: a host may print others, such as a login banner."""
_MOST_LINE = 1 << 20
_MOST_KEPT_LINES = 20
_POLL_S = 0.01
# Margin beyond the longest regular gap between two requests, after which a worker takes the director for lost.
_SPARE_S = 60.0
_EXIT_GRACE_S = 1.0


class WorkerLost(RuntimeError):
    """Raised when a worker ends or does not answer; the message says why."""


class Channel(Protocol):
    """Director's end of the channel to one worker."""

    def order(self, message: dict[str, Any]) -> None:
        """Sends a request."""
        ...

    def answer(self, deadline: float) -> dict[str, Any]:
        """Waits for the answer until `deadline`, in terms of `time.monotonic`.

        Raises:
            WorkerLost: The worker has ended, or did not answer in time.
        """
        ...

    def close(self) -> None:
        """Ends the worker if it still runs."""
        ...


# --- pipes ------------------------------------------------------------------------------------------------------------


class PipeChannel:
    """Channel to a worker that a local command, such as ssh, has started."""

    def __init__(self, command: Sequence[str], environment: dict[str, str] | None = None) -> None:
        self.errors: list[str] = []
        """Last lines of the command's standard error."""
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # only the director gets Ctrl-C, and then ends the workers
            env=environment,
        )
        self._readers = [threading.Thread(target=each, daemon=True) for each in (self._read_answers, self._read_errors)]
        for reader in self._readers:
            reader.start()

    def order(self, message: dict[str, Any]) -> None:
        """Sends a request. A worker that has ended is noticed by `answer`."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()

    def answer(self, deadline: float) -> dict[str, Any]:
        """Waits for the answer."""
        while True:
            try:
                line = self._lines.get(timeout=max(deadline - time.monotonic(), 0.001))
            except queue.Empty:
                raise WorkerLost("it does not answer") from None
            if line is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(5.0)
                self._readers[1].join(1.0)
                raise WorkerLost(f"it ended with status {self.process.poll()}")
            return _parsed(line)

    def close(self) -> None:
        """Ends the command: first by closing its input, then by signals."""
        with contextlib.suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.close()
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            if number is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(2.0)
                break
        for reader in self._readers:
            reader.join(1.0)

    def _read_answers(self) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(ValueError), self.process.stdout as lines:
            while line := lines.readline(_MOST_LINE):
                if line.startswith(MARK):
                    self._lines.put(line.removeprefix(MARK))
        self._lines.put(None)

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        with contextlib.suppress(ValueError), self.process.stderr as lines:
            for line in lines:
                if line.strip():
                    self.errors.append(line.strip()[:500])
                    del self.errors[:-_MOST_KEPT_LINES]


class PipeWorkerChannel:
    """Worker's end: requests on standard input, answers on standard output.

    A thread reads the requests, so that the worker ends soon after its director, whatever it is doing.
    """

    def __init__(self) -> None:
        self._orders: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="orders", daemon=True).start()

    def receive(self) -> dict[str, Any] | None:
        """Waits for the next request; None if the director is gone."""
        return self._orders.get()

    def _read(self) -> None:
        with contextlib.suppress(WorkerLost, ValueError):
            while line := sys.stdin.readline(_MOST_LINE):
                self._orders.put(_parsed(line))
        self._orders.put(None)
        time.sleep(_EXIT_GRACE_S)
        os._exit(1)

    def answer(self, message: dict[str, Any]) -> None:
        """Prints the answer."""
        with contextlib.suppress(OSError):
            print(MARK + json.dumps(message), flush=True)


# --- a store ----------------------------------------------------------------------------------------------------------


class StoreChannel:
    """Channel to a worker that polls a store of torch.distributed for its requests."""

    def __init__(self, store: Any, rank: int) -> None:
        self._store, self._rank = store, rank
        self._orders = self._answers = 0

    def order(self, message: dict[str, Any]) -> None:
        """Puts a request into the store."""
        self._store.set(f"order/{self._rank}/{self._orders}", json.dumps(message))
        self._orders += 1

    def answer(self, deadline: float) -> dict[str, Any]:
        """Polls the store for the answer."""
        found = _poll(self._store, f"answer/{self._rank}/{self._answers}", deadline)
        if found is None:
            raise WorkerLost("it does not answer")
        self._answers += 1
        return found

    def close(self) -> None:
        """Does nothing: the worker ends on its last request."""


class StoreWorkerChannel:
    """Worker's end of a channel over a store.

    Args:
        store: The store.
        rank: This rank.
        request_gap_s: Longest time between two requests of a live director: see `director.longest_request_gap_s`.
    """

    def __init__(self, store: Any, rank: int, request_gap_s: float) -> None:
        self._store, self._rank, self._pause_s = store, rank, request_gap_s
        self._orders = self._answers = 0

    def receive(self) -> dict[str, Any] | None:
        """Polls for the next request; None if the store is gone or the director has been silent for too long."""
        try:
            found = _poll(
                self._store, f"order/{self._rank}/{self._orders}", time.monotonic() + self._pause_s + _SPARE_S
            )
        except WorkerLost:
            return None
        self._orders += 1
        return found

    def answer(self, message: dict[str, Any]) -> None:
        """Puts the answer into the store."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"answer/{self._rank}/{self._answers}", json.dumps(message))
        self._answers += 1


def _poll(store: Any, key: str, deadline: float) -> dict[str, Any] | None:
    # Poll instead of a blocking wait, which would block the other threads of this store.
    pause = _POLL_S
    try:
        while not store.check([key]):
            if time.monotonic() > deadline:
                return None
            time.sleep(pause)
            pause = min(1.2 * pause, 0.1)
        return _parsed(store.get(key).decode())
    except RuntimeError as error:
        raise WorkerLost(f"the store is gone: {str(error).splitlines()[0]}") from error


def _parsed(text: str) -> dict[str, Any]:
    try:
        message = json.loads(text)
    except ValueError as error:
        raise WorkerLost("its answer is not JSON") from error
    if not isinstance(message, dict):
        raise WorkerLost("its answer is not a JSON object")
    return message

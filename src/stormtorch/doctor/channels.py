"""Ways between the one who directs an examination and its ranks: the pipes of a command such as ssh, or a store.

Both carry one order and one answer at a time, as JSON.
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
"""Beginning of the lines that are answers: a host may print others, such as a greeting."""
_MOST_LINE = 1 << 20
_MOST_KEPT_LINES = 20
_POLL_S = 0.01
# A rank may wait for its next order while all others come, and while others answer: beyond that, this long.
_SPARE_S = 60.0
_EXIT_GRACE_S = 1.0


class WorkerLost(RuntimeError):
    """Raised when a rank ends, or does not answer; the message says why."""


class Channel(Protocol):
    """Director's side of the way to one rank."""

    def order(self, message: dict[str, Any]) -> None:
        """Sends an order."""
        ...

    def answer(self, deadline: float) -> dict[str, Any]:
        """Waits for the answer, until a moment of `time.monotonic`.

        Raises:
            WorkerLost: The rank has ended, or the answer has not come in time.
        """
        ...

    def close(self) -> None:
        """Ends the rank, if it still runs."""
        ...


# --- pipes ------------------------------------------------------------------------------------------------------------


class PipeChannel:
    """A rank that a command of this machine has started, such as ssh."""

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
            start_new_session=True,  # Ctrl-C is for the director, who then ends the ranks
            env=environment,
        )
        self._readers = [threading.Thread(target=each, daemon=True) for each in (self._read_answers, self._read_errors)]
        for reader in self._readers:
            reader.start()

    def order(self, message: dict[str, Any]) -> None:
        """Sends an order. A rank that has ended shows when its answer is awaited."""
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
        """Ends the command: first by the end of its input, and then by force."""
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
    """The rank's side: orders on the standard input, answers on the standard output.

    A thread reads the orders, so that a rank ends soon after its director, however that has ended and whatever the rank
    is doing.
    """

    def __init__(self) -> None:
        self._orders: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="orders", daemon=True).start()

    def receive(self) -> dict[str, Any] | None:
        """Waits for the next order; None when the director has gone."""
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
    """A rank that looks for its orders in a store of torch.distributed."""

    def __init__(self, store: Any, rank: int) -> None:
        self._store, self._rank = store, rank
        self._orders = self._answers = 0

    def order(self, message: dict[str, Any]) -> None:
        """Leaves an order in the store."""
        self._store.set(f"order/{self._rank}/{self._orders}", json.dumps(message))
        self._orders += 1

    def answer(self, deadline: float) -> dict[str, Any]:
        """Looks for the answer until it is there."""
        found = _poll(self._store, f"answer/{self._rank}/{self._answers}", deadline)
        if found is None:
            raise WorkerLost("it does not answer")
        self._answers += 1
        return found

    def close(self) -> None:
        """Does nothing: the rank has been told to end."""


class StoreWorkerChannel:
    """The rank's side of a store.

    Args:
        store: The store.
        rank: This rank.
        request_gap_s: Longest time between two orders of a director that lives: see `director.longest_pause_s`.
    """

    def __init__(self, store: Any, rank: int, request_gap_s: float) -> None:
        self._store, self._rank, self._pause_s = store, rank, request_gap_s
        self._orders = self._answers = 0

    def receive(self) -> dict[str, Any] | None:
        """Looks for the next order; None when the store has gone, or no director that lives would wait so long."""
        try:
            found = _poll(
                self._store, f"order/{self._rank}/{self._orders}", time.monotonic() + self._pause_s + _SPARE_S
            )
        except WorkerLost:
            return None
        self._orders += 1
        return found

    def answer(self, message: dict[str, Any]) -> None:
        """Leaves the answer in the store."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"answer/{self._rank}/{self._answers}", json.dumps(message))
        self._answers += 1


def _poll(store: Any, key: str, deadline: float) -> dict[str, Any] | None:
    # By looking again and again, not by waiting in the store: a waiting call would keep other threads out.
    pause = _POLL_S
    try:
        while not store.check([key]):
            if time.monotonic() > deadline:
                return None
            time.sleep(pause)
            pause = min(1.2 * pause, 0.1)
        return _parsed(store.get(key).decode())
    except RuntimeError as error:
        raise WorkerLost(f"the store has gone: {str(error).splitlines()[0]}") from error


def _parsed(text: str) -> dict[str, Any]:
    try:
        message = json.loads(text)
    except ValueError as error:
        raise WorkerLost("it answers what is no JSON") from error
    if not isinstance(message, dict):
        raise WorkerLost("it answers what is no object")
    return message

"""Runs a command on every host: prints each line of output with its host, and always ends all ranks."""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO, NamedTuple

_GRACE_S = 5.0
TIMED_OUT = 124
"""Status of a rank that the timeout ended, as timeout(1) has it."""


class OutputLine(NamedTuple):
    """One line of output."""

    host: int
    local: int
    """Number of the rank on its host."""
    error: bool
    """Whether the line comes from the standard error."""
    text: str


def run_everywhere(
    commands: Sequence[Sequence[str]],
    *,
    per_node: int,
    timeout_s: float | None,
    write: Callable[[OutputLine], None] | None,
) -> list[int]:
    """Runs the commands, one per rank, until all have ended, and returns their statuses."""
    ranks = _Ranks(commands, per_node, write or _print)
    try:
        return ranks.wait(timeout_s)
    finally:
        ranks.end()


class _Ranks:
    def __init__(self, commands: Sequence[Sequence[str]], per_node: int, write: Callable[[OutputLine], None]) -> None:
        self._lock = threading.Lock()
        self._write = write
        self._processes: list[subprocess.Popen[str]] = []
        self._readers: list[threading.Thread] = []
        for rank, command in enumerate(commands):
            # Its own process group: signals reach only the command and its children.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            self._processes.append(process)
            for stream, error in ((process.stdout, False), (process.stderr, True)):
                assert stream is not None
                where = rank // per_node, rank % per_node, error
                reader = threading.Thread(target=self._read, args=(stream, *where), daemon=True)
                reader.start()
                self._readers.append(reader)

    def _read(self, stream: IO[str], host: int, local: int, error: bool) -> None:
        with stream, contextlib.suppress(ValueError):
            for text in stream:
                with self._lock:  # lines of different ranks must not mix
                    self._write(OutputLine(host, local, error, text.rstrip("\n")))

    def wait(self, timeout_s: float | None) -> list[int]:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        late: set[int] = set()
        try:
            for rank, process in enumerate(self._processes):
                left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
                try:
                    process.wait(left)
                except subprocess.TimeoutExpired:
                    late = {each for each in range(rank, len(self._processes)) if self._runs(each)}
                    break
        except KeyboardInterrupt:
            # The ranks have their own process groups, so Ctrl-C has not reached them.
            self._signal(signal.SIGINT)
            self._await_all(_GRACE_S)
            raise
        self.end()
        for reader in self._readers:
            # A daemon that a rank left behind may hold the pipe open; the lab ends it later.
            reader.join(1.0)
        return [TIMED_OUT if rank in late else _status(p.returncode) for rank, p in enumerate(self._processes)]

    def end(self) -> None:
        """Asks all ranks to end, waits, and kills those that still run."""
        for ending in (signal.SIGTERM, signal.SIGKILL):
            if not any(self._runs(rank) for rank in range(len(self._processes))):
                return
            self._signal(ending)
            self._await_all(_GRACE_S)

    def _runs(self, rank: int) -> bool:
        return self._processes[rank].poll() is None

    def _signal(self, number: signal.Signals) -> None:
        for rank, process in enumerate(self._processes):
            if self._runs(rank):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)

    def _await_all(self, within_s: float) -> None:
        deadline = time.monotonic() + within_s
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.0))


def _status(code: int) -> int:
    return 128 - code if code < 0 else code


def _print(line: OutputLine) -> None:
    print(f"h{line.host} | {line.text}", flush=True)

"""Runs scripts as processes that need not import torch: each is forked from one that has.

    script = warm_scripts.start([path, "argument"], stdout=subprocess.PIPE)  # as subprocess.Popen

A script runs as `__main__` of its interpreter, to its very end: exit handlers, destructors and exit codes are those of
a script that was started by its name. Where the start itself matters, tests use subprocess.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

_LONGEST_ORDER_BYTES = 1 << 17


# --- the caller -------------------------------------------------------------------------------------------------------


class Script:
    """A script that runs, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, pid: int, status: socket.socket, pipes: list[IO[Any] | None]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin, self.stdout, self.stderr = pipes
        self._status = status

    def poll(self) -> int | None:
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            ready, _, _ = select.select([self._status], [], [], timeout)
            if not ready:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            received = self._status.recv(64)
            assert received, "the process that all scripts are forked from has died"
            self.returncode = int(received)
            self._status.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Server:
    """The process that is forked, and the line to it."""

    def __init__(self) -> None:
        self._line, far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with far_end:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(far_end.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[far_end.fileno()],
            )
        atexit.register(self.end)

    def order(self, order: dict[str, Any], handed: list[int]) -> tuple[int, socket.socket]:
        status, far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with far_end:
            socket.send_fds(self._line, [json.dumps(order).encode()], [far_end.fileno(), *handed])
        return int(status.recv(64)), status

    def end(self) -> None:
        self._line.close()
        self._process.wait()


_server: _Server | None = None


def start(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    stdin: Any = None,
    stdout: Any = None,
    stderr: Any = None,
    text: bool = False,
    start_new_session: bool = False,
) -> Script:
    """Runs a script.

    Args:
        command: The path of the script, then its arguments.
        env: All variables; None is those of this process.
        stdin: A file, subprocess.PIPE, or None for this process's.
        stdout: Likewise.
        stderr: Likewise.
        text: Whether pipes carry text.
        start_new_session: Whether the process leads a session of its own.
    """
    global _server
    _server = _server or _Server()
    pipes: list[IO[Any] | None] = []
    handed: list[int] = []
    theirs: list[int] = []
    for number, given in enumerate((stdin, stdout, stderr)):
        if given == subprocess.PIPE:
            reading, writing = os.pipe()
            own, far_end = (writing, reading) if number == 0 else (reading, writing)
            mode = ("w" if number == 0 else "r") + ("" if text else "b")
            pipes.append(os.fdopen(own, mode))
            theirs.append(far_end)
            handed.append(far_end)
        else:
            pipes.append(None)
            handed.append(number if given is None else given.fileno())
    order = {
        "command": list(command),
        "env": dict(os.environ if env is None else env),
        "folder": os.getcwd(),
        "session": start_new_session,
    }
    try:
        return Script(*_server.order(order, handed), pipes)
    finally:
        for each in theirs:
            os.close(each)


# --- the process that is forked ---------------------------------------------------------------------------------------


def _serve(line: socket.socket) -> dict[str, Any] | None:
    """Forks for each order. Returns the order in each fork, and None here, when there are no more."""
    running: dict[int, tuple[int, socket.socket]] = {}  # of each process's descriptor, its number and who waits for it
    while True:
        ready, _, _ = select.select([line.fileno(), *running], [], [])
        for descriptor in set(ready) - {line.fileno()}:
            pid, status = running.pop(descriptor)
            _, code = os.waitpid(pid, 0)
            with status, contextlib.suppress(OSError):  # somebody may have given up waiting
                status.send(str(os.waitstatus_to_exitcode(code)).encode())
            os.close(descriptor)
        if line.fileno() not in ready:
            continue
        received, handed, _, _ = socket.recv_fds(line, _LONGEST_ORDER_BYTES, 4)
        if not received:
            return None
        status = socket.socket(fileno=handed[0])
        pid = os.fork()
        if pid == 0:
            line.close()
            status.close()
            for descriptor, (_, other) in running.items():
                os.close(descriptor)
                other.close()
            for number, descriptor in enumerate(handed[1:]):
                os.dup2(descriptor, number)
                os.close(descriptor)
            order: dict[str, Any] = json.loads(received)
            return order
        for descriptor in handed[1:]:
            os.close(descriptor)
        status.send(str(pid).encode())
        running[os.pidfd_open(pid)] = (pid, status)


def _become(order: dict[str, Any]) -> str:
    """Makes this process what a script expects, and returns its path."""
    if order["session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["folder"])
    sys.argv = order["command"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    return sys.argv[0]


if __name__ == "__main__":
    from warm_start import PRELOADED

    for _name in PRELOADED:
        importlib.import_module(_name)
    gc.freeze()  # a script's end need not look at what was imported here
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the scripts, and for whoever runs them
    _order = _serve(socket.socket(fileno=int(sys.argv[1])))
    if _order is not None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        __file__ = _become(_order)
        exec(compile(Path(__file__).read_bytes(), __file__, "exec"), globals())

"""Network namespaces of the lab, which exist exactly as long as this process holds a pipe open.

A holder is `cat` as the first process of its own namespaces. It reads from a pipe whose other end this process holds.
When this process ends, for whatever reason, the pipe closes and the holder ends; the kernel then kills every process in
the holder's pid namespace, and the network namespace vanishes with its devices. No namespace has a name, so none can
remain.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from stormtorch_lab.netns.access import Access, LabError, tool

_READY_TIMEOUT_S = 10.0


class Holder:
    """One set of namespaces, and the process that keeps them alive."""

    pid: int = 0
    """Process id of the holder, in this process's pid namespace."""

    def __init__(self, access: Access, pipe: int, *, inside: "Holder | None" = None) -> None:
        # The first holder makes the user namespace; the others are made inside it.
        first = access.unshare() if inside is None else [*access.enter(inside.pid), tool("unshare")]
        command = [*first, "--net", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", tool("cat")]
        self._access = access
        # A session of its own: Ctrl-C in the terminal should reach only this program, which then ends the holders.
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
        )
        self.pid = self._await_child()

    def _await_child(self) -> int:
        """Waits until `cat` runs: unshare and nsenter fork, and their last descendant has the namespaces."""
        deadline = time.monotonic() + _READY_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                assert self._process.stderr is not None
                problem = self._process.stderr.read().decode(errors="replace").strip()
                raise LabError(f"cannot make a namespace: {problem}")
            pid = _last_descendant(self._process.pid)
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().strip() == "cat":
                    return pid
            time.sleep(0.002)
        self.end()
        raise LabError(f"a namespace was not ready after {_READY_TIMEOUT_S:g} s")

    def enter(self, *, processes: bool = False) -> list[str]:
        """Command prefix that enters the network namespace, or, with `processes`, all namespaces of the host."""
        return self._access.enter(self.pid, "net", *(("uts", "pid", "mount") if processes else ()))

    @property
    def network(self) -> str:
        """Path of the network namespace."""
        return f"/proc/{self.pid}/ns/net"

    @property
    def alive(self) -> bool:
        """Whether the holder still runs."""
        return self._process.poll() is None

    def run(self, command: Sequence[str], text: str = "", *, processes: bool = False) -> str:
        """Runs a command in the network namespace with `text` as its standard input, and returns its output."""
        return run_command([*self.enter(processes=processes), *command], text)

    def end(self) -> None:
        """Kills the holder, and with it everything that runs inside."""
        # With --kill-child, the holder and its pid namespace die with unshare. Killing both at once leaves no gap.
        for pid in {self.pid, self._process.pid} - {0}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()


def run_command(command: Sequence[str], text: str = "") -> str:
    """Runs a command and returns its output; raises LabError if it fails."""
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, check=False, timeout=60, start_new_session=True
    )
    if done.returncode != 0:
        words = " ".join(command[command.index("--") + 1 :] if "--" in command else command)
        raise LabError(f"{words} failed: {(done.stderr or done.stdout).strip() or f'status {done.returncode}'}")
    return done.stdout


def send_inside(pid: int, number: int) -> None:
    """Sends a signal to the command that the nsenter of this process id runs in a holder's namespaces."""
    child = _children(pid)
    if not child:
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(child[0], number)
        if number == signal.SIGCONT:
            os.kill(pid, number)  # nsenter stops itself when its command is stopped


def _last_descendant(pid: int) -> int:
    while True:
        children = _children(pid)
        if not children:
            return pid
        pid = children[-1]


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return list(_children_by_search(pid))
    except OSError:
        return []


def _children_by_search(pid: int) -> Iterator[int]:
    """Children of a process, for kernels without CONFIG_PROC_CHILDREN."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                yield int(stat.parent.name)

"""Ranks started by mpirun, for benchmarks that compare MPI with other backends in the same processes.

Only processes that mpirun has started can use MPI. So mpirun starts all ranks, and each connects to a socket of this
process and receives its work; from then on it is a rank like any other. `python -m stormtorch_lab.jobs.mpi
SOCKET` is the program of such a rank.
"""

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from stormtorch.checks import BadSetting
from stormtorch_lab.jobs.failed import RankFailed
from stormtorch_lab.jobs.ranks import collect, interrupts_blocked, open_rendezvous, run_one

Result = TypeVar("Result")

NEEDS = (
    "has mpi only where Open MPI and mpi4py are installed: apt-get install openmpi-bin libopenmpi-dev, then pip "
    "install mpi4py (or 'stormtorch-lab[mpi]')"
)
_RANK = "OMPI_COMM_WORLD_RANK"
_GRACE_S = 5.0


def check_mpi() -> None:
    """Raises `BadSetting` if ranks with MPI cannot be started; the message names the packages to install."""
    if importlib.util.find_spec("mpi4py") is None or "Open MPI" not in mpi_version():
        raise BadSetting("backends", NEEDS)


def mpi_version() -> str:
    """First line of `mpirun --version`; empty without mpirun."""
    path = shutil.which("mpirun")
    if path is None:
        return ""
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=30)
    return done.stdout.partition("\n")[0]


def run_ranks_by_mpi(
    work: Callable[..., Result],
    world: int,
    args: tuple[Any, ...] = (),
    *,
    timeout_s: float,
    on_message: Callable[[int, object], object] | None = None,
) -> list[Result]:
    """Does what `run_ranks` does on this machine, with ranks started by mpirun.

    Raises:
        RankFailed: The first rank to fail, with its message; or mpirun itself, with its output.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stormtorch-")))
        site = stack.enter_context(open_rendezvous(None))
        server = stack.enter_context(socket.socket(socket.AF_UNIX))
        server.bind(str(folder / "job"))  # only this user can read the folder
        server.listen(2 * world)
        job = stack.enter_context(_mpirun(world, folder))
        # Closed before mpirun ends: a rank that hangs, or that mpirun leaves behind, exits when its lifeline closes.
        lines = [stack.enter_context(line) for line in _lines(server, world, job, folder, timeout_s)]
        for rank, line in enumerate(lines[:world]):
            line.send(sys.path)  # so that ranks can import the work
            line.send((rank, world, site, timeout_s, work, args))
        results = collect(lines[:world], timeout_s, on_message, lambda rank: _death(rank, job, folder))
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(_GRACE_S)  # ranks leave MPI together and clean up
        return results


@contextlib.contextmanager
def _mpirun(world: int, folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    # The user may choose more ranks than cores; none is bound to a core, as with the other backends.
    command = ["mpirun", "-n", str(world), "--oversubscribe", "--bind-to", "none"]
    command += [sys.executable, "-m", __spec__.name, str(folder / "job")]
    environment = dict(os.environ)
    if os.geteuid() == 0:
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    with (folder / "said").open("wb") as said, interrupts_blocked():
        job = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,  # only this process receives Ctrl-C, and ends mpirun
        )
    try:
        yield job
    finally:
        with interrupts_blocked():
            try:
                job.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                job.terminate()
                try:
                    job.wait(_GRACE_S)
                except subprocess.TimeoutExpired:
                    job.kill()
                    job.wait()


def _lines(
    server: socket.socket, world: int, job: "subprocess.Popen[bytes]", folder: Path, timeout_s: float
) -> list[Connection]:
    """Accepts two connections of every rank: its message connection, by rank, and then the lifelines."""
    found: dict[int, Connection] = {}
    server.settimeout(0.2)
    deadline = time.monotonic() + timeout_s
    while len(found) < 2 * world:
        try:
            stream, _ = server.accept()
        except TimeoutError:
            if job.poll() is None and time.monotonic() < deadline:
                continue
            for line in found.values():
                line.close()
            raise _failed("mpirun did not start all ranks", folder) from None
        stream.setblocking(True)
        line = Connection(stream.detach())
        found[line.recv()] = line
    return [found[index] for index in range(2 * world)]


def _death(rank: int, job: "subprocess.Popen[bytes]", folder: Path) -> RankFailed:
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.wait(_GRACE_S)  # its output has the reason
    return _failed(f"rank {rank}: ended without a result", folder, rank)


def _failed(problem: str, folder: Path, rank: int | None = None) -> RankFailed:
    said = (folder / "said").read_text(encoding="utf-8", errors="replace")
    return RankFailed(problem, rank=rank, details=said)


# --- on every rank -------------------------------------------------------------------------------------------------


def _connected(path: str, index: int) -> Connection:
    stream = socket.socket(socket.AF_UNIX)
    stream.connect(path)
    line = Connection(stream.detach())
    line.send(index)
    return line


def _end_with(lifeline: Connection) -> None:
    """Ends this process when the one that started mpirun ends: a killed parent cannot end its ranks."""
    with contextlib.suppress(EOFError, OSError):
        lifeline.recv()
    os._exit(1)


def main() -> None:
    """Runs one rank: connects, receives its work, runs it, and exits."""
    path, own, world = sys.argv[1], int(os.environ[_RANK]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
    line, lifeline = _connected(path, own), _connected(path, world + own)
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    sys.path[:] = line.recv()
    run_one(line, *line.recv())


if __name__ == "__main__":
    main()

"""Ranks started by mpirun, for benchmarks that have MPI beside other backends: in the same processes, in turns.

MPI can only be used by processes that mpirun has started. So it starts all ranks, and each of them connects to a socket
of this process, which gives it its work; from there on it is a rank like any other. `python -m stormtorch_lab.jobs.mpi
SOCKET` is such a rank.
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
    "has mpi only where Open MPI and mpi4py are: apt-get install openmpi-bin libopenmpi-dev, then pip install mpi4py "
    "(or 'stormtorch-lab[mpi]')"
)
_RANK = "OMPI_COMM_WORLD_RANK"
_GRACE_S = 5.0


def check_mpi() -> None:
    """Raises `BadSetting` where ranks with MPI cannot be started; says what to install."""
    if importlib.util.find_spec("mpi4py") is None or "Open MPI" not in mpi_version():
        raise BadSetting("backends", NEEDS)


def mpi_version() -> str:
    """First line of what mpirun says about itself; empty where there is none."""
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
    """Does what `run_ranks` does, beside this process, with ranks that mpirun starts.

    Raises:
        RankFailed: The first rank to fail, with its message; or mpirun itself, with what it said.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stormtorch-")))
        site = stack.enter_context(open_rendezvous(None))
        server = stack.enter_context(socket.socket(socket.AF_UNIX))
        server.bind(str(folder / "job"))  # the folder is this user's alone
        server.listen(2 * world)
        job = stack.enter_context(_mpirun(world, folder))
        # Closed before mpirun is ended: a rank that hangs, or that mpirun leaves behind, ends with its lifeline.
        lines = [stack.enter_context(line) for line in _lines(server, world, job, folder, timeout_s)]
        for rank, line in enumerate(lines[:world]):
            line.send(sys.path)  # by which ranks find the work
            line.send((rank, world, site, timeout_s, work, args))
        results = collect(lines[:world], timeout_s, on_message, lambda rank: _death(rank, job, folder))
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(_GRACE_S)  # ranks leave MPI together, and clean up behind them
        return results


@contextlib.contextmanager
def _mpirun(world: int, folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    # More ranks than cores are the user's wish, and none is bound to a core, as those of other backends are not.
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
            start_new_session=True,  # Ctrl-C is for this process, which ends it
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
    """Accepts two connections of every rank: its line, by rank, and then the lifelines."""
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
        job.wait(_GRACE_S)  # it says why
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
    """Ends this process with the one that has started mpirun: one that was killed cannot end its ranks."""
    with contextlib.suppress(EOFError, OSError):
        lifeline.recv()
    os._exit(1)


def main() -> None:
    """Runs one rank: connects, takes its work, and leaves when that is done."""
    path, own, world = sys.argv[1], int(os.environ[_RANK]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
    line, lifeline = _connected(path, own), _connected(path, world + own)
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    sys.path[:] = line.recv()
    run_one(line, *line.recv())


if __name__ == "__main__":
    main()

"""Launch of an examination's workers: on hosts by ssh, or as processes that torchrun has started."""

import contextlib
import os
import shlex
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from stormtorch.checks import BadSetting
from stormtorch.doctor.channels import PipeChannel, StoreChannel, StoreWorkerChannel
from stormtorch.doctor.director import Director
from stormtorch.doctor.sockets import REQUESTED_BUFFER_BYTES
from stormtorch.doctor.worker import WorkerSettings, run_worker

DEFAULT_SSH = "ssh -o BatchMode=yes -o ConnectTimeout=5"
HERE = "localhost"
"""Host name that means this machine: its worker starts without ssh."""
MOST_HOSTS = 64


@dataclass(frozen=True, kw_only=True)
class HostLaunch:
    """How to start workers on hosts."""

    hosts: Sequence[str]
    ssh: str = DEFAULT_SSH
    """Command that takes a host and a command line, as ssh does."""
    python: str = sys.executable
    """Python on the hosts."""
    interface: str | None = None
    port: int = 0
    receive_buffer_bytes: int = REQUESTED_BUFFER_BYTES

    def __post_init__(self) -> None:
        if not 2 <= len(self.hosts) <= MOST_HOSTS:
            raise BadSetting(
                "hosts",
                f"must be 2 to {MOST_HOSTS}, got {len(self.hosts)}: a link needs two ends. {HERE} is this machine, "
                f"as in: stormtorch doctor {HERE} {next((each for each in self.hosts if each != HERE), 'HOST')}",
            )
        for host in self.hosts:
            if not host or host.startswith("-"):
                raise BadSetting("hosts", f"must be names or addresses, got {host!r}")
            if self.hosts.count(host) > 1:
                raise BadSetting("hosts", f"must name each host once, got {host} twice")


def launch_on_hosts(start: HostLaunch) -> Director:
    """Starts a worker on each host.

    Raises:
        BadSetting: The command that reaches hosts does not exist.
    """
    channels: dict[int, PipeChannel] = {}
    try:
        for rank, host in enumerate(start.hosts):
            channels[rank] = PipeChannel(_command(start, rank, host))
    except OSError as error:
        for channel in channels.values():
            channel.close()
        raise BadSetting("ssh", f"cannot be run: {error.strerror}: {error.filename}") from error

    def explain(rank: int, why: str) -> str:
        return _explained(start.hosts[rank], channels[rank], why, start)

    return Director(channels, explain)


def _command(start: HostLaunch, rank: int, host: str) -> list[str]:
    words = ["-m", "stormtorch", "doctor", "--rank", str(rank)]
    if start.interface is not None:
        words += ["--interface", start.interface]
    if start.port:
        words += ["--port", str(start.port)]
    if start.receive_buffer_bytes != REQUESTED_BUFFER_BYTES:
        words += ["--receive-buffer-bytes", str(start.receive_buffer_bytes)]
    if host == HERE:
        other = next(each for each in start.hosts if each != host).rpartition("@")[2]
        return [sys.executable, *words, "--towards", other]
    return [*shlex.split(start.ssh), host, shlex.join([start.python, *words])]


def _explained(host: str, channel: PipeChannel, why: str, start: HostLaunch) -> str:
    """Explains in one sentence why a host failed, from the output of the command that reaches it."""
    said = "\n".join(channel.errors)
    last = channel.errors[-1] if channel.errors else ""
    status = channel.process.poll()
    if "No module named stormtorch" in said or "No module named 'stormtorch'" in said:
        return f"{host} has no stormtorch for {start.python}: install it there, or choose another Python by --python"
    if "No such command 'doctor'" in said or "No such option" in said:
        return f"{host} has another version of stormtorch: install the same version on all hosts"
    if status in (126, 127) or ("not found" in said and start.python in said):
        return f"{host} has no Python at {start.python}: name a Python with stormtorch by --python"
    if "Could not resolve hostname" in said or "Name or service not known" in said:
        return f"{host} is an unknown host: no address is known for this name"
    if "Permission denied" in said:
        return f"{host} refuses this user: make `ssh {host} true` work without a password"
    if "Host key verification failed" in said:
        return f"{host} has a host key that this machine does not know: run `ssh {host} true` once by hand"
    if status == 255 or "Connection refused" in said or "timed out" in said:
        return f"{host} cannot be reached by ssh: {last or 'no reason given'}"
    return f"{host}: {why}" + (f": {last}" if last else "")


# --- torchrun ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LauncherEnvironment:
    """Environment of a process that torchrun, or a launcher with the same variables, has started."""

    rank: int
    world: int
    master: str
    port: int
    agent_store: bool
    """Whether the launcher hosts the store; otherwise rank 0 does."""
    attempt: str


def launcher_environment() -> LauncherEnvironment | None:
    """Reads the launcher's variables; None if this process was not started by one.

    Raises:
        BadSetting: They contradict each other.
    """
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    values = {name: os.environ.get(name, "") for name in names}
    if not (values["RANK"] and values["WORLD_SIZE"]):
        return None
    try:
        rank, world, port = int(values["RANK"]), int(values["WORLD_SIZE"]), int(values["MASTER_PORT"] or 0)
    except ValueError:
        rank = world = port = -1
    if not (0 <= rank < world and 0 < port < 65536 and values["MASTER_ADDR"]):
        given = ", ".join(f"{name}={value or 'unset'}" for name, value in values.items())
        raise BadSetting(
            "rank", f"is unknown: the launcher's variables are incomplete or contradict each other ({given})"
        )
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return LauncherEnvironment(rank, world, values["MASTER_ADDR"], port, agent, attempt)


def rendezvous_in_store(here: LauncherEnvironment, wait_s: float) -> Any:
    """Opens the store for the rendezvous of launched ranks.

    Raises:
        ConnectionError: It cannot be reached in time, or its port is taken.
    """
    serves = here.rank == 0 and not here.agent_store
    deadline = time.monotonic() + wait_s
    # torch logs a page before it raises: first check that the store is reachable.
    while not serves:
        try:
            socket.create_connection((here.master, here.port), timeout=max(deadline - time.monotonic(), 0.1)).close()
            break
        except OSError as error:
            if time.monotonic() > deadline - 0.2 or isinstance(error, socket.gaierror):
                raise ConnectionError(
                    f"rank {here.rank}: cannot reach the store at {here.master}:{here.port} (MASTER_ADDR and _PORT): "
                    f"{error.strerror or error}. Is rank 0 running, and does the firewall allow TCP?"
                ) from error
            time.sleep(0.2)
    # Imported late: torch takes seconds to import.
    from torch._C._distributed_c10d import PrefixStore, TCPStore  # torch.distributed has them, but its types do not
    from torch.distributed import DistError

    try:
        store = TCPStore(
            here.master,
            here.port,
            here.world,
            serves,
            timeout=timedelta(seconds=max(wait_s, 5.0)),
            wait_for_workers=False,  # so that rank 0 can name the missing ranks
        )
    except (DistError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConnectionError(
            f"rank {here.rank}: cannot open the store at {here.master}:{here.port}: {reason}"
        ) from error
    return PrefixStore(f"stormtorch-doctor/{here.attempt}", store)


def run_launched_worker(store: Any, settings: WorkerSettings, request_gap_s: float) -> None:
    """Runs the worker of a launched rank until rank 0 ends it, or sends no request for too long."""
    run_worker(StoreWorkerChannel(store, settings.rank, request_gap_s), settings)


def direct_launched(store: Any, world: int, settings: WorkerSettings, request_gap_s: float) -> Director:
    """Directs launched ranks from rank 0, which also runs a worker."""
    threading.Thread(
        target=run_launched_worker, args=(store, settings, request_gap_s), daemon=True, name="rank 0"
    ).start()
    return Director({rank: StoreChannel(store, rank) for rank in range(world)}, lambda rank, why: f"rank {rank} {why}")


def publish_exit_code(store: Any, code: int, ranks: Sequence[int]) -> None:
    """Publishes the exit code for all launched ranks, and waits up to 5 s for them: the store may end with rank 0."""
    store.set("outcome", str(code))
    with contextlib.suppress(RuntimeError):
        store.wait([f"left/{rank}" for rank in ranks if rank != 0], timedelta(seconds=5))


def wait_for_exit_code(store: Any, rank: int) -> int:
    """Exit code that rank 0 published; 1 if it ended without one."""
    with contextlib.suppress(RuntimeError, ValueError):
        store.wait(["outcome"], timedelta(seconds=60))
        code = int(store.get("outcome"))
        store.set(f"left/{rank}", "")
        return code
    return 1

"""Runs the ranks of a job as processes of this machine or on the hosts of a lab, and ends all of them.

    def work(member: Member, greeting: str) -> int:
        member.store.set(f"hello/{member.rank}", greeting)
        return member.rank

    run_ranks(work, 4, ("good day",), timeout_s=60)      # [0, 1, 2, 3]

On a lab's hosts, `run_ranks(work, 4, lab=lab, ...)`, each rank is a process on its own host, or `per_host` of them
share a host; the rest is the same. The processes are spawned, not forked, so `work` must be importable: a
function of a module, not of a notebook cell, and a script that calls this needs `if __name__ == "__main__":`.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import resource_tracker, spawn
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from torch.distributed import DistNetworkError, TCPStore  # type: ignore[attr-defined]  # public, but not marked as exported
from torch.distributed.distributed_c10d import Store

from stormtorch_lab.jobs.failed import RankFailed
from stormtorch_lab.netns.lab import MASTER_PORT, Lab
from stormtorch_lab.netns.links.kernel_network import DEVICE, MANAGEMENT_DEVICE

Result = TypeVar("Result")

LOOPBACK = "127.0.0.1"
# Seconds between a request to end a rank and its kill.
_GRACE_S = 2.0
# Store key: number of ranks that no longer need the store.
_RANKS_DONE = "stormtorch/left"


@dataclass(frozen=True)
class Member:
    """A rank's view of its job: rank, host, the shared store, and the connection to the parent."""

    rank: int
    world: int
    store: Store
    report: Callable[[object], None]
    """Sends something picklable to the parent's `on_message`."""
    request: Callable[[object], Any]
    """Sends something picklable to the parent's `on_message`, and returns its result."""
    interface: str = "lo"
    """Interface of the measured network."""
    control_interface: str = "lo"
    """Interface of a network that is not measured, for barriers and votes."""


@dataclass(frozen=True)
class Rendezvous:
    """Addresses at which the ranks find the store and each other."""

    host: str = LOOPBACK
    port: int = MASTER_PORT
    served_inside: bool = False
    """Whether rank 0 serves the store; otherwise the parent does."""
    interface: str = "lo"
    control_interface: str = "lo"


@dataclass(frozen=True)
class _Report:
    what: object
    wants_reply: bool = False
    """Whether the rank waits for a reply."""


@dataclass(frozen=True)
class _Done:
    result: Any


@dataclass(frozen=True)
class _Failed:
    message: str
    details: str
    at_s: float


_Message: TypeAlias = _Report | _Done | _Failed


def run_ranks(
    work: Callable[..., Result],
    world: int,
    args: tuple[Any, ...] = (),
    *,
    timeout_s: float,
    on_message: Callable[[int, object], object] | None = None,
    lab: Lab | None = None,
    per_host: int = 1,
) -> list[Result]:
    """Calls `work(member, *args)` in `world` processes and returns the results by rank.

    However this call ends, also by Ctrl-C, all processes have ended. The ranks themselves do not receive Ctrl-C.

    Args:
        work: An importable function.
        world: Number of ranks.
        args: Further arguments for it, picklable.
        timeout_s: All ranks must have ended by then.
        on_message: Called in this process with the rank and its message; a rank that wants a reply receives the result.
        lab: Lab whose hosts run the ranks; it needs a management network. None runs them on this machine.
        per_host: Number of ranks on each host of the lab: host 0 has the first ranks.

    Raises:
        RankFailed: The first rank to fail, with its message; the others are ended.
    """
    context = multiprocessing.get_context("spawn")
    processes: list[SpawnProcess] = []
    connections: list[Connection] = []
    # Started now: started on first use, it would undo interrupts_blocked for the first rank.
    resource_tracker.ensure_running()
    with open_rendezvous(lab) as site, _pythons(lab, world, per_host) as pythons:
        try:
            for rank in range(world):
                connection, far_end = context.Pipe()
                connections.append(connection)
                process = context.Process(
                    target=run_one,
                    args=(far_end, rank, world, site, timeout_s, work, args),
                    name=f"stormtorch rank {rank}",
                    daemon=True,
                )
                context.set_executable(pythons[rank])
                with interrupts_blocked():
                    process.start()
                    processes.append(process)
                far_end.close()
            return collect(connections, timeout_s, on_message, lambda rank: _death(rank, processes[rank]))
        finally:
            # Before their temporary files are removed: a process that is still starting would fail noisily.
            with interrupts_blocked():
                _end(processes)
                for connection in connections:
                    connection.close()


@contextlib.contextmanager
def open_rendezvous(lab: Lab | None) -> Iterator[Rendezvous]:
    """Chooses the address of the rendezvous; without a lab, this process serves the store."""
    if lab is not None:
        # This process cannot reach the hosts, so rank 0 serves the store.
        yield Rendezvous(
            host=lab.management_address(0),
            served_inside=True,
            interface=DEVICE,
            control_interface=MANAGEMENT_DEVICE,
        )
        return
    # This process serves the store, not rank 0: the kernel chooses a free port, and ranks may exit in any order.
    store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    yield Rendezvous(port=store.port)
    del store


@contextlib.contextmanager
def _pythons(lab: Lab | None, world: int, per_host: int) -> Iterator[list[str]]:
    """Finds the executable of each rank. For a host of a lab it is a script that enters the host's namespaces.

    Such a rank is a grandchild: `_end` signals its parent, nsenter. The rank itself ends when its process object is
    closed, which it takes for the end of this process; at the latest it ends with the lab.
    """
    before = os.fsdecode(spawn.get_executable())
    try:
        if lab is None:
            yield [before] * world
        else:
            with tempfile.TemporaryDirectory(prefix="stormtorch-") as folder:
                hosts = [str(lab.python(host, Path(folder))) for host in range(-(-world // per_host))]
                yield [hosts[rank // per_host] for rank in range(world)]
    finally:
        spawn.set_executable(before)


def collect(
    connections: list[Connection],
    timeout_s: float,
    on_message: Callable[[int, object], object] | None,
    death: Callable[[int], RankFailed],
) -> list[Any]:
    """Receives all messages and returns the results by rank; `death` makes the error for a closed connection."""
    deadline = time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    while len(results) < len(connections):
        open_connections = {connection: rank for rank, connection in enumerate(connections) if rank not in results}
        ready = wait(list(open_connections), timeout=max(deadline - time.monotonic(), 0.0))
        if not ready:
            late = ", ".join(str(rank) for rank in open_connections.values())
            raise RankFailed(f"timed out after {timeout_s:g} s, waiting for rank {late}: raise the time-out or do less")
        failures: list[tuple[float, RankFailed]] = []
        for connection, rank in open_connections.items():
            if connection not in ready:
                continue
            try:
                message: _Message = connection.recv()
            except (EOFError, OSError):
                failures.append((time.monotonic(), death(rank)))
                continue
            if isinstance(message, _Report):
                answer = None if on_message is None else on_message(rank, message.what)
                if message.wants_reply:
                    connection.send(answer)
            elif isinstance(message, _Done):
                results[rank] = message.result
            else:
                failed = RankFailed(f"rank {rank}: {message.message}", rank=rank, details=message.details)
                failures.append((message.at_s, failed))
        if failures:
            # One failure makes the other ranks fail. The first is the cause; only that one is raised.
            raise min(failures, key=lambda failure: failure[0])[1]
    return [results[rank] for rank in range(len(connections))]


def _death(rank: int, process: SpawnProcess) -> RankFailed:
    process.join(_GRACE_S)
    code = process.exitcode
    if code is not None and code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            how += " (did the machine run out of memory?)"
    else:
        how = f"ended without a result, exit code {code}"
    return RankFailed(f"rank {rank}: {how}", rank=rank)


def _end(processes: list[SpawnProcess]) -> None:
    for process in processes:
        # A rank that has sent its result ends by itself.
        process.join(0.05)
        if process.is_alive():
            process.terminate()
    deadline = time.monotonic() + _GRACE_S
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0.0))
        if process.is_alive():
            process.kill()
        process.join()
        process.close()


@contextlib.contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Delays Ctrl-C until the block ends. Processes started inside never receive it: their parent ends them."""
    received: list[int] = []
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    # The mask covers this thread only; the kernel may deliver the signal to a thread of the store or a progress bar.
    in_charge = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, lambda number, _frame: received.append(number)) if in_charge else None
    try:
        yield
    finally:
        if in_charge:
            signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        if received:
            signal.raise_signal(signal.SIGINT)


def run_one(
    connection: Connection,
    rank: int,
    world: int,
    site: Rendezvous,
    timeout_s: float,
    work: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """Runs a rank in its process: calls `work`, and sends its result or error to the parent."""
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def request(what: object) -> Any:
        connection.send(_Report(what, wants_reply=True))
        return connection.recv()

    message: _Message
    try:
        torch.set_num_threads(1)
        serving = site.served_inside and rank == 0
        store = TCPStore(
            site.host, site.port, is_master=serving, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
        )
        member = Member(
            rank,
            world,
            store,
            lambda what: connection.send(_Report(what)),
            request,
            site.interface,
            site.control_interface,
        )
        message = _Done(work(member, *args))
        # The server of the store may exit as soon as it has counted all ranks, before its reply is sent.
        with contextlib.suppress(DistNetworkError):
            store.add(_RANKS_DONE, 1)
    except Exception as error:
        message = _Failed(f"{type(error).__name__}: {error}", traceback.format_exc(), time.monotonic())
    connection.send(message)
    if serving and isinstance(message, _Done):
        while store.add(_RANKS_DONE, 0) < world:  # other ranks still need the store
            time.sleep(0.01)
        time.sleep(0.1)  # so do its last replies
    connection.close()
    if site.served_inside:
        # Skip interpreter shutdown: aborted TCP connections would block it, and hold the host's ports.
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(0)


def _end_with_parent() -> None:
    """Ends this process when its parent ends: a killed parent cannot end its children."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)

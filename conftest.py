"""Worlds to test in: threads over loopback UDP, real processes, and the simulated network."""

import multiprocessing
import pickle
import queue
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch._C._distributed_c10d import FileStore, HashStore  # torch.distributed has them, but its types do not

import warm_start
from stormtorch import Options, connect, faults
from stormtorch.exchange.exchange import Transport
from stormtorch.exchange.simulated import SimulatedNetwork
from stormtorch.network.faults import _active
from stormtorch.udp.udp import UdpTransport

# Where a shell put pytest into the background, Ctrl-C is ignored, which every process started by a test would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["stormtorch_lab.netns.fixtures"]
warm_start.use()

T = TypeVar("T")
World = Callable[[int, Callable[[Transport], Any]], list[Any]]
"""Runs `work(transport)` on every rank of a world and returns the results by rank."""

# Small enough that a hang ends the test by its own message, long before pytest's time limit.
# Over loopback, but by datagram: what the tests of transports are about.
OPTIONS = Options(silence_s=5.0, timeout_s=30.0, linger_s=0.5, shared_memory=False)
SHARING = replace(OPTIONS, shared_memory=True)
STORM: dict[str, Any] = {"loss": 0.20, "duplicate": 0.05, "reorder": 0.05, "corrupt": 0.01}
"""The bad network that exact collectives must survive."""


def store_of_threads(timeout_s: float = 20.0) -> HashStore:
    """A store for ranks that are threads of this process."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def local_world(
    n: int,
    work: Callable[[UdpTransport], T],
    *,
    options: Options | Sequence[Options] = OPTIONS,
    within_s: float = 60.0,
) -> list[T]:
    """Calls `work(transport)` on n ranks, each a thread with its own UDP endpoint on loopback.

    Returns the results by rank, or raises the error that came first; every transport is closed either way.
    """
    store = store_of_threads(within_s)
    each = [options] * n if isinstance(options, Options) else list(options)
    results: list[Any] = [None] * n
    errors: list[BaseException] = []
    transports: list[UdpTransport | None] = [None] * n

    def body(rank: int) -> None:
        try:
            with connect(store, rank, n, each[rank]) as transport:
                transports[rank] = transport
                try:
                    results[rank] = work(transport)
                except BaseException as error:
                    errors.append(error)  # before the transport closes, which others see as an error of their own
                    raise
        except BaseException as error:
            if error not in errors:
                errors.append(error)

    threads = [threading.Thread(target=body, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(n)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + within_s
    for thread in threads:
        thread.join(max(end - time.monotonic(), 0.0))
    stuck = [thread.name for thread in threads if thread.is_alive()]
    if stuck:
        # Closing wakes whoever still waits.
        for transport in transports:
            if transport is not None:
                transport.close()
        for thread in threads:
            thread.join(5.0)
        errors.insert(0, TimeoutError(f"after {within_s} s there still ran: {', '.join(stuck)}"))
    if errors:
        raise errors[0]
    return results


def _child(work: Callable[[UdpTransport], Any], rank: int, n: int, path: str, options: Options, results: Any) -> None:
    torch.set_num_threads(1)
    try:
        store = FileStore(path, n)
        store.set_timeout(timedelta(seconds=60))
        with connect(store, rank, n, options) as transport:
            # As bytes: torch would otherwise share a tensor's memory, which is gone with this process.
            results.put((rank, True, pickle.dumps(work(transport))))
    except BaseException:
        results.put((rank, False, traceback.format_exc()))


def processes(
    n: int, work: Callable[[UdpTransport], T], *, options: Options = OPTIONS, within_s: float = 90.0
) -> list[T]:
    """Calls `work(transport)` on n ranks, each in its own process; `work` must be a function of a test module."""
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    found: dict[int, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "store")
        children = [
            context.Process(target=_child, args=(work, rank, n, path, options, results), daemon=True)
            for rank in range(n)
        ]
        try:
            for child in children:
                child.start()
            end = time.monotonic() + within_s
            while len(found) < n:
                try:
                    rank, well, result = results.get(timeout=0.2)
                except queue.Empty:
                    dead = [i for i, child in enumerate(children) if i not in found and child.exitcode not in (None, 0)]
                    if dead or time.monotonic() > end:
                        raise TimeoutError(f"of {n} processes {sorted(found)} answered, {dead} died") from None
                    continue
                if not well:
                    raise RuntimeError(f"rank {rank} failed:\n{result}")
                found[rank] = pickle.loads(result)
            for child in children:
                child.join(10.0)
        finally:
            for child in children:
                if child.is_alive():
                    child.kill()
                    child.join(5.0)
            results.close()
    return [found[rank] for rank in range(n)]


def simulated(n: int, work: Callable[[Transport], T], *, seed: int = 1, **knobs: Any) -> list[T]:
    """The same on the simulated network."""
    return SimulatedNetwork(n, seed=seed, **knobs).run(work)


def in_simulator(n: int, work: Callable[[Transport], Any]) -> list[Any]:
    return simulated(n, work)


def in_stormy_simulator(n: int, work: Callable[[Transport], Any]) -> list[Any]:
    return simulated(n, work, **STORM)


def over_udp(n: int, work: Callable[[Transport], Any]) -> list[Any]:
    return local_world(n, work)


def over_stormy_udp(n: int, work: Callable[[Transport], Any]) -> list[Any]:
    # Ordinary datagrams: in those of 64 KB there would be too few to lose.
    with faults(seed=1, **STORM):
        return local_world(n, work, options=replace(OPTIONS, datagram_bytes=1472))


def wait_until_near(transport: UdpTransport, within_s: float = 10.0) -> None:
    """Waits until this rank shares memory with all others."""
    end = time.monotonic() + within_s
    while len(transport.near()) < transport.world - 1:
        assert time.monotonic() < end, f"rank {transport.rank} shares memory with {transport.near()} only"
        time.sleep(0.001)


def through_memory(n: int, work: Callable[[Transport], Any]) -> list[Any]:
    def near(transport: UdpTransport) -> Any:
        wait_until_near(transport)
        return work(transport)

    return local_world(n, near, options=SHARING)


WORLDS: dict[str, World] = {
    "sim": in_simulator,
    "stormy-sim": in_stormy_simulator,
    "udp": over_udp,
    "stormy-udp": over_stormy_udp,
    "memory": through_memory,
}


@pytest.fixture(params=list(WORLDS))
def world(request: pytest.FixtureRequest) -> World:
    return WORLDS[request.param]


@pytest.fixture(autouse=True)
def _one_thread_and_no_faults_left() -> Iterator[None]:
    # Ranks are threads already: torch's own would only fight them for the cores.
    torch.set_num_threads(1)
    yield
    left = list(_active)
    for active in left:
        active.stop()
    assert not left, "a test left faults active"

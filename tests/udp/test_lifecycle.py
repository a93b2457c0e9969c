"""Opening, closing, dropping and interrupting: nothing hangs, nothing leaks, no memory is freed too soon."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import OPTIONS, STORM, local_world, over_udp, store_of_threads

from reference import reduced, same_bits, values
from stormtorch import Options, connect, faults
from stormtorch.collectives import Group, Op, all_reduce, barrier, receive, send
from stormtorch.errors import Closed
from stormtorch.udp.udp import UdpTransport


def descriptors() -> dict[str, str]:
    """What this process has open, by number."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            found[number] = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # the one that listed them
            continue
    return found


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


@contextmanager
def pair(options: Options = OPTIONS) -> Iterator[list[UdpTransport]]:
    """Two connected transports in one thread's hands."""
    store = store_of_threads()
    both: list[UdpTransport] = []
    other = threading.Thread(target=lambda: both.append(connect(store, 1, 2, options)))
    other.start()
    both.insert(0, connect(store, 0, 2, options))
    other.join()
    both.sort(key=lambda transport: transport.rank)
    try:
        yield both
    finally:
        closing = threading.Thread(target=both[1].close)
        closing.start()
        both[0].close()
        closing.join()


@pytest.mark.thorough
def test_closing_leaves_no_thread_and_no_descriptor_even_while_the_transport_is_held() -> None:
    over_udp(2, lambda transport: barrier(Group(transport)).wait())  # whatever is opened once and for all
    gc.collect()
    before, running = descriptors(), threads()
    held: list[UdpTransport] = []

    def work(transport: UdpTransport) -> None:
        held.append(transport)
        all_reduce(Group(transport), torch.ones(50_000)).wait()
        assert len(descriptors()) > len(before)

    for _ in range(3):
        local_world(3, work)
        assert descriptors() == before
        # A thread that was joined is still listed for a moment.
        end = time.monotonic() + 2.0
        while threads() > running and time.monotonic() < end:
            time.sleep(0.01)
        assert threads() == running
    assert len(held) == 9


def test_a_port_can_be_taken_again_at_once() -> None:
    def work(transport: UdpTransport) -> int:
        barrier(Group(transport)).wait()
        return transport.endpoint.ports[0]

    ports = local_world(2, work)
    again = [replace(OPTIONS, port=port) for port in ports]
    for _ in range(3):
        assert local_world(2, work, options=again) == ports


def test_closing_twice_is_harmless_and_a_closed_transport_says_so() -> None:
    with pair() as (zero, one):
        running = receive(Group(zero), torch.zeros(5), 1)
        one.close()
        one.close()
        with pytest.raises(Closed, match="rank 1: barrier"):
            barrier(Group(one))
        zero.close()
        with pytest.raises(Exception, match="rank 0: receive"):
            running.wait(5.0)


def test_closing_wakes_a_thread_that_waits() -> None:
    with pair() as (zero, _):
        pending = receive(Group(zero), torch.zeros(5), 1)
        said: list[BaseException] = []

        def wait() -> None:
            try:
                pending.wait()
            except BaseException as error:
                said.append(error)

        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        time.sleep(0.2)
        zero.close()
        waiting.join(5.0)
        assert not waiting.is_alive()
        assert isinstance(said[0], Closed)


def test_several_threads_may_wait_on_one_transport() -> None:
    n, count = 2, 8

    def work(transport: UdpTransport) -> list[torch.Tensor]:
        tensors = [values(transport.rank, 20_000 + index, seed=index) for index in range(count)]
        groups = [Group(transport, name=f"thread {index}") for index in range(count)]

        def one(index: int) -> None:
            for _ in range(10):
                barrier(groups[index]).wait()
            all_reduce(groups[index], tensors[index]).wait()

        waiting = [threading.Thread(target=one, args=(index,), daemon=True) for index in range(count)]
        for thread in waiting:
            thread.start()
        for thread in waiting:
            thread.join(20.0)
        assert not any(thread.is_alive() for thread in waiting)
        return tensors

    for tensors in local_world(n, work):
        for index, tensor in enumerate(tensors):
            wanted = reduced([values(rank, 20_000 + index, seed=index) for rank in range(n)], Op.SUM)
            assert same_bits(tensor, wanted)


@pytest.mark.thorough
def test_memory_of_an_abandoned_exchange_lives_until_the_exchange_has_ended() -> None:
    with pair() as (zero, one):
        array = np.zeros(1_000, dtype=np.float32)
        alive = weakref.ref(array)
        pending = receive(Group(zero), torch.from_numpy(array), 1)
        del array, pending
        gc.collect()
        held = alive()
        assert held is not None, "the engine still writes here"
        send(Group(one), torch.ones(1_000), 0).wait()
        barriers = [barrier(Group(zero)), barrier(Group(one))]
        for each in barriers:
            each.wait()
        assert held.sum() == 1_000.0
        del held
        # It is let go some time later, at the latest when further exchanges were begun.
        for _ in range(3):
            for each in [barrier(Group(zero)), barrier(Group(one))]:
                each.wait()
        gc.collect()
        assert alive() is None, "and is not kept for ever"


@pytest.mark.thorough
def test_memory_is_let_go_when_a_wait_returns() -> None:
    with pair() as (zero, one):
        array = np.zeros(1_000, dtype=np.float32)
        alive = weakref.ref(array)
        pending = receive(Group(zero), torch.from_numpy(array), 1)
        send(Group(one), torch.ones(1_000), 0).wait()
        pending.wait()
        del array
        gc.collect()
        assert alive() is None, "although the pending is still held"
        assert len(pending.wait()) == 1


@pytest.mark.thorough
def test_an_idle_transport_uses_no_processor_time() -> None:
    with pair() as both:
        for each in [barrier(Group(transport)) for transport in both]:
            each.wait()
        waiting = [receive(Group(both[0]), torch.zeros(5), 1)]
        time.sleep(0.3)
        used = time.process_time()
        time.sleep(1.0)
        assert time.process_time() - used < 0.05
        del waiting


@pytest.mark.thorough
def test_transports_that_nobody_closed_do_not_keep_the_process() -> None:
    script = """
        import threading, torch
        from torch.distributed import HashStore
        from stormtorch import Options, connect
        from stormtorch.collectives import Group, receive
        store, both = HashStore(), []
        start = lambda rank: both.append(connect(store, rank, 2, Options(linger_s=0.2)))
        threads = [threading.Thread(target=start, args=(rank,)) for rank in range(2)]
        [thread.start() for thread in threads]; [thread.join() for thread in threads]
        pending = receive(Group(both[0]), torch.zeros(5), 1 - both[0].rank)
        print("end", flush=True)
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "end\n"), ended.stderr
    assert ended.stderr == ""


@pytest.mark.thorough
@pytest.mark.parametrize("waits_with", ["wait()", "wait(60.0)"])
def test_ctrl_c_ends_a_wait_and_the_process_at_once(waits_with: str) -> None:
    script = f"""
        import threading, time, torch
        from torch.distributed import HashStore
        from stormtorch import Options, connect
        from stormtorch.collectives import Group, receive
        store, other = HashStore(), []
        thread = threading.Thread(target=lambda: other.append(connect(store, 1, 2)))
        thread.start()
        with connect(store, 0, 2) as transport:
            thread.join()
            try:
                print("waiting", flush=True)
                receive(Group(transport), torch.zeros(5), 1).{waits_with}
            except KeyboardInterrupt:
                print("interrupted", flush=True)
        other[0].close()
        print("closed", flush=True)
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "waiting\n"
        time.sleep(0.5)
        began = time.monotonic()
        child.send_signal(signal.SIGINT)
        said, complaints = child.communicate(timeout=30)
        assert said == "interrupted\nclosed\n", complaints
        assert (child.returncode, complaints) == (0, "")
        assert time.monotonic() - began < 20.0
    finally:
        child.kill()
        child.wait()


def test_leaving_is_heard_through_a_storm_and_does_not_take_long() -> None:
    def work(transport: UdpTransport) -> float:
        barrier(Group(transport)).wait()
        began = time.monotonic()
        transport.close()
        return time.monotonic() - began

    took = []
    for seed in range(5):
        with faults(seed=seed, **STORM):
            took += local_world(3, work, options=replace(OPTIONS, linger_s=6.0))
    assert max(took) < 12.0
    assert sorted(took)[len(took) // 2] < 1.5, "most linger to the end: goodbyes are not heard"


@pytest.mark.parametrize("call", ["health", "links"])
def test_questions_to_the_engine_let_other_threads_go_on(call: str) -> None:
    """The thread that drives the engine may hold its lock; a thread that waits for that lock must not hold Python's."""
    begun, seen, before = threading.Event(), threading.Event(), sys.getswitchinterval()
    with pair() as transports:
        asked = transports[0]

        def question() -> object:
            return asked.health() if call == "health" else asked.links([1])

        def ask() -> None:
            begun.set()
            until = time.monotonic() + 3.0
            while not seen.is_set() and time.monotonic() < until:
                question()
            missed.append(not seen.is_set())

        missed: list[bool] = []
        thread = threading.Thread(target=ask)
        sys.setswitchinterval(100.0)  # no thread is interrupted: one goes on when another releases the lock
        try:
            thread.start()
            begun.wait()
            seen.set()
            thread.join()
        finally:
            sys.setswitchinterval(before)
    assert missed == [False]


def test_links_of_all_peers_come_at_once() -> None:
    def work(transport: UdpTransport) -> None:
        for _ in range(5):
            all_reduce(Group(transport), torch.ones(50_000)).wait()
        peers = [peer for peer in range(3) if peer != transport.rank]
        found = transport.links(peers)
        assert [(round_trip_s > 0.0, loss) for round_trip_s, loss, _, _ in found] == [(True, 0.0)] * 2
        assert [path_bytes for *_, path_bytes in found] == [transport.path_bytes(peer) for peer in peers]
        assert transport.links([]) == []
        assert transport.link(peers[1])[1] == found[1][1]

    local_world(3, work)

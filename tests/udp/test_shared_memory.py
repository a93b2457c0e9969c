"""Shared-memory channels between ranks of one machine: their setup, and the same bits as by datagram."""

import contextlib
import json
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import OPTIONS, SHARING, local_world, processes, wait_until_near

from stormtorch import LOSSY, Options, StormError, faults
from stormtorch.collectives import (
    Group,
    Op,
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    reduce_scatter,
)
from stormtorch.udp.machine import machine_id
from stormtorch.udp.udp import UdpTransport

Work = Callable[[UdpTransport], Any]


def near(work: Work) -> Work:
    """Returns work for a rank that begins once all ranks share memory."""

    def begins(transport: UdpTransport) -> Any:
        wait_until_near(transport)
        barrier(Group(transport)).wait()
        return work(transport)

    return begins


def values(transport: UdpTransport, count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    made = torch.randn(count, generator=torch.Generator().manual_seed(1000 * seed + transport.rank))
    return (made * 100).to(dtype)


def some_collectives(transport: UdpTransport, rounds: int, seed: int, most: int = 60_000) -> list[bytes]:
    """Results of collectives drawn at random, the same on every rank, as bytes."""
    group, drawn = Group(transport), random.Random(seed)
    results: list[torch.Tensor] = []
    for turn in range(rounds):
        kind, count = drawn.randrange(6), drawn.choice([0, 1, 7, drawn.randrange(300), drawn.randrange(most)])
        dtype = drawn.choice([torch.float32, torch.bfloat16, torch.float16, torch.int64])
        op = drawn.choice([Op.SUM, Op.AVG, Op.MAX]) if dtype.is_floating_point else Op.SUM
        own = values(transport, count * group.size, dtype, turn)
        if kind == 0:
            all_reduce(group, own, op).wait()
            results.append(own)
        elif kind == 1:
            out = torch.empty(count, dtype=dtype)
            reduce_scatter(group, out, list(own.chunk(group.size)) if count else [own[:0]] * group.size, op).wait()
            results.append(out)
        elif kind == 2:
            rooms = [torch.empty_like(own) for _ in range(group.size)]
            all_gather(group, rooms, own).wait()
            results += rooms
        elif kind == 3:
            broadcast(group, own, turn % group.size).wait()
            results.append(own)
        elif kind == 4:
            outs = [torch.empty(count, dtype=dtype) for _ in range(group.size)]
            all_to_all(group, outs, list(own.view(group.size, count))).wait()
            results += outs
        else:
            barrier(group).wait()
    return [each.view(torch.uint8).numpy().tobytes() for each in results]


@pytest.mark.parametrize("n", [2, 3, 5])
def test_collectives_give_the_same_bits_as_by_datagram(n: int) -> None:
    shared = local_world(n, near(lambda transport: some_collectives(transport, 40, seed=n)), options=SHARING)
    assert shared == local_world(n, lambda transport: some_collectives(transport, 40, seed=n))


def _in_a_process(transport: UdpTransport) -> tuple[list[bytes], int, int]:
    wait_until_near(transport)
    results = some_collectives(transport, 25, seed=7)
    health = transport.health()
    return results, health["shared_bytes_sent"], health["bytes_sent"]


@pytest.mark.thorough
def test_processes_share_memory_and_send_hardly_any_datagrams() -> None:
    told = processes(3, _in_a_process, options=SHARING)
    assert [each[0] for each in told] == local_world(3, lambda transport: some_collectives(transport, 25, seed=7))
    for _, shared_bytes, sent_bytes in told:
        assert shared_bytes > 1_000_000
        assert sent_bytes < shared_bytes / 10


def test_a_rank_without_shared_memory_takes_part_by_datagram() -> None:
    def work(transport: UdpTransport) -> tuple[list[bytes], list[int]]:
        if transport.rank != 1:
            end = time.monotonic() + 10.0
            while len(transport.near()) < 1 and time.monotonic() < end:
                time.sleep(0.001)
        return some_collectives(transport, 20, seed=3), transport.near()

    told = local_world(3, work, options=[SHARING, OPTIONS, SHARING])
    assert [each[1] for each in told] == [[2], [], [0]]
    assert [each[0] for each in told] == local_world(3, lambda transport: some_collectives(transport, 20, seed=3))


@pytest.mark.parametrize(
    "options", [replace(SHARING, rate="400mbit"), replace(SHARING, datagram_bytes=1472)], ids=["rate", "datagram_bytes"]
)
def test_options_that_describe_a_network_keep_to_datagrams(options: Options) -> None:
    def work(transport: UdpTransport) -> list[int]:
        barrier(Group(transport)).wait()
        time.sleep(0.2)
        barrier(Group(transport)).wait()
        return transport.near()

    assert local_world(2, work, options=options) == [[], []]


def test_injected_loss_happens_although_memory_is_shared() -> None:
    both = threading.Barrier(2)

    @near
    def work(transport: UdpTransport) -> tuple[float, float]:
        group = Group(transport)
        # Faults are those of the process, and so of both ranks.
        with faults(loss=0.2, seed=1) if transport.rank == 0 else contextlib.nullcontext():
            both.wait(10.0)
            (lossy,) = all_reduce(group, torch.ones(1 << 20), Op.AVG, reliability=LOSSY).wait()
            both.wait(10.0)
        both.wait(10.0)
        (whole,) = all_reduce(group, torch.ones(1 << 20), Op.AVG, reliability=LOSSY).wait()
        return lossy.arrived, whole.arrived

    for lossy, whole in local_world(2, work, options=SHARING):
        assert 0.4 < lossy < 0.98
        assert whole == 1.0


def test_a_rank_that_goes_in_the_midst_is_named_and_leaves_nothing() -> None:
    told: dict[int, int | None] = {}
    nonces: set[str] = set()
    gone = threading.Event()

    @near
    def work(transport: UdpTransport) -> None:
        group = Group(transport)
        nonces.add(transport.cards[transport.rank].nonce)
        if transport.rank == 1:
            transport.close(0.0)
            gone.wait(20.0)
            return
        with pytest.raises(StormError) as caught:
            for _ in range(1000):
                all_reduce(group, torch.ones(500_000)).wait()
        told[transport.rank] = caught.value.culprit
        gone.set()

    local_world(3, work, options=replace(SHARING, silence_s=1.0))
    assert told == {0: 1, 2: 1}
    names = Path("/proc/net/unix").read_text()
    assert len(nonces) == 3 and not any(each in names for each in nonces)  # others may run here, too


def _fork(transport: UdpTransport) -> list[bytes]:
    wait_until_near(transport)
    if transport.rank == 0:
        assert "memfd:stormtorch" in Path("/proc/self/maps").read_text()
        child = os.fork()
        if child == 0:
            maps = Path("/proc/self/maps").read_text()
            os._exit(1 if "memfd:stormtorch" in maps else 0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return some_collectives(transport, 10, seed=5)


@pytest.mark.thorough
def test_a_forked_process_neither_keeps_the_memory_nor_disturbs_it() -> None:
    # In processes of their own, whose main thread forks: a fork destroys what other threads keep to themselves. There,
    # torch keeps gloo groups of earlier tests, whose end waits for a thread that the child does not have.
    assert processes(2, _fork, options=SHARING) == local_world(
        2, lambda transport: some_collectives(transport, 10, seed=5)
    )


def test_strangers_at_the_socket_get_nothing() -> None:
    @near
    def work(transport: UdpTransport) -> list[bytes]:
        if transport.rank == 1:
            name = f"\0stormtorch-{transport.cards[1].nonce}"
            hello = {"rank": 0, "nonce": "another", "to": transport.cards[1].nonce, "proof": ""}
            keyless = hello | {"nonce": transport.cards[0].nonce}
            for message in (b"", b"{", b"[]", b"{}", *(json.dumps(each).encode() for each in (hello, keyless))):
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                    stranger.settimeout(5.0)
                    stranger.connect(name)
                    bits = struct.pack("2i", 0, 1)
                    stranger.sendmsg([message or b" "], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, bits)])
                    answer, ancillary, _, _ = stranger.recvmsg(200, 100)
                    assert b"yes" not in answer
                    assert not ancillary
        barrier(Group(transport)).wait()
        return some_collectives(transport, 10, seed=6)

    sealed = replace(SHARING, key=b"a job key of any length from sixteen bytes")
    assert local_world(2, work, options=sealed) == local_world(
        2, lambda transport: some_collectives(transport, 10, seed=6)
    )


def test_a_process_of_another_user_that_takes_the_name_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    # The other side of each connection is this process, so pretend that it is another user's.
    monkeypatch.setattr("stormtorch.udp.shared_memory._user", lambda _: os.getuid() + 1)

    def work(transport: UdpTransport) -> list[int]:
        barrier(Group(transport)).wait()
        time.sleep(0.3)
        barrier(Group(transport)).wait()
        return transport.near()

    assert local_world(2, work, options=SHARING) == [[], []]


def test_memory_that_is_shared_is_there_from_the_start() -> None:
    """A page that the kernel could not give later would end a process by SIGBUS."""

    def work(transport: UdpTransport) -> list[tuple[int, int]]:
        found = []
        for each in transport.endpoint.offer_shared_memory(1 - transport.rank, 1):
            status = os.fstat(each)
            found.append((status.st_size, 512 * status.st_blocks))
            os.close(each)
        return found

    for ring, bell, shelf in local_world(2, work):
        assert ring[1] >= ring[0] > 1 << 19
        assert shelf[1] >= shelf[0] > 1 << 21
        assert bell[0] == 0


def test_a_machine_is_known_by_its_network() -> None:
    assert len(machine_id()) == 16

    def work(transport: UdpTransport) -> tuple[str, ...]:
        return tuple(transport.machine_of(rank) for rank in range(3))

    assert local_world(2, work) == [(machine_id(), machine_id(), "")] * 2

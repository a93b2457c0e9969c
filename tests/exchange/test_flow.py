"""Flow control: floods, crowds and slow receivers use bounded memory, overflow no buffer and lose nothing."""

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import OPTIONS, local_world

from reference import reduced, same_bits, values
from stormtorch import Options, faults
from stormtorch.collectives import Group, Op, all_reduce, all_to_all, barrier, broadcast, receive, send
from stormtorch.exchange.exchange import Transport
from stormtorch.exchange.simulated import SimulatedNetwork
from stormtorch.udp.udp import UdpTransport

POOL = 1 << 20


@pytest.mark.thorough
@pytest.mark.parametrize("storm", [{}, {"loss": 0.05}])
@pytest.mark.parametrize("datagram_bytes", [None, 1472])
def test_a_flood_of_exchanges_never_posted_stays_within_the_pool_and_holds_up_nobody(
    storm: dict[str, Any], datagram_bytes: int | None
) -> None:
    n, turns = 3, 10

    def work(transport: UdpTransport) -> dict[str, Any]:
        group = Group(transport)
        if transport.rank == 1:
            # Kept, as their memory is in use until the transport is closed.
            sizes = [1, 0, 100, 5_000, 100_000]
            flood = [send(group, torch.ones(sizes[tag % 5]), 0, tag=1 + tag) for tag in range(1_500)]
        for turn in range(turns):
            tensor = values(transport.rank, 30_000, seed=turn)
            all_reduce(group, tensor).wait()
            assert same_bits(tensor, reduced([values(rank, 30_000, seed=turn) for rank in range(n)], Op.SUM))
        # Also the flooder's own messages still get through, and those it sent before.
        if transport.rank == 1:
            send(group, torch.ones(300_000), 0).wait()
            flood[3].wait()
            flood[1_499].wait()
        if transport.rank == 0:
            late, later, last = torch.zeros(300_000), torch.zeros(5_000), torch.zeros(100_000)
            for tensor, tag in ((late, 0), (later, 4), (last, 1_500)):
                receive(group, tensor, 1, tag=tag).wait()
                assert bool((tensor == 1.0).all())
        barrier(group).wait()
        return transport.health()

    options = replace(OPTIONS, pool_bytes=POOL, datagram_bytes=datagram_bytes)
    with faults(seed=8, **storm):
        flooded = local_world(n, work, options=options)[0]
    assert flooded["pool_refused"] > 0, "the flood was larger than the pool"
    assert 0.3 * POOL < flooded["pool_peak_bytes"] <= POOL


def test_one_flooding_peer_leaves_the_others_their_share_of_the_pool() -> None:
    def work(transport: Transport) -> list[float]:
        group = Group(transport)
        if transport.rank == 1:
            flood = [send(group, torch.ones(2_000), 0, tag=tag) for tag in range(400)]
            barrier(group).wait()
            return [float(len(flood))]
        if transport.rank == 2:
            # Small enough for one's own share: done before its receiver has posted anything.
            return [send(group, torch.ones(2_000), 0, tag=7).wait(5.0)[0].elapsed_s, float(barrier(group).wait() != [])]
        barrier(group).wait()
        tensor = torch.zeros(2_000)
        receive(group, tensor, 2, tag=7).wait()
        return tensor.tolist()

    options = Options(datagram_bytes=1472, pool_bytes=POOL)
    results = SimulatedNetwork(3, options=options, seed=9).run(work)
    assert results[0] == [1.0] * 2_000
    assert results[2][0] < 0.1


@pytest.mark.slow
def test_sixty_four_endpoints_exchange_a_megabyte_each_exactly_under_loss() -> None:
    n, part = 64, 4_096  # elements to each: 1 MiB per endpoint

    def work(transport: UdpTransport) -> tuple[bool, dict[str, Any]]:
        inputs = [torch.full((part,), float(64 * transport.rank + peer)) for peer in range(n)]
        outputs = [torch.zeros(part) for _ in range(n)]
        all_to_all(Group(transport), outputs, inputs).wait()
        right = all(bool((outputs[peer] == 64 * peer + transport.rank).all()) for peer in range(n))
        return right, transport.health()

    with faults(loss=0.05, seed=10):
        results = local_world(n, work, options=replace(OPTIONS, datagram_bytes=1472, timeout_s=60.0), within_s=90.0)
    assert all(right for right, _ in results)
    sent = sum(health["datagrams_sent"] for _, health in results)
    repaired = sum(health["repaired"] for _, health in results)
    assert 0 < repaired < 0.2 * sent, "what was not lost is not sent twice"
    assert sum(health["overflow"] for _, health in results) == 0


@pytest.mark.thorough
@pytest.mark.parametrize("datagram_bytes", [None, 1472])
def test_a_slow_receiver_is_waited_for_without_overflow_or_timeout(datagram_bytes: int | None) -> None:
    n = 3

    def work(transport: UdpTransport) -> dict[str, Any]:
        group = Group(transport)
        for turn in range(3):
            # Large messages towards a rank that has not posted, from all others at once.
            if transport.rank == 0:
                time.sleep(0.5)
            tensor = torch.full((2_000_000,), float(turn * (transport.rank + 1)))
            all_reduce(group, tensor).wait()
            assert bool((tensor == 6.0 * turn).all())
        return transport.health()

    # Silence shorter than the sleep: the engine answers although its rank does not.
    options = replace(OPTIONS, silence_s=0.4, datagram_bytes=datagram_bytes)
    for health in local_world(n, work, options=options):
        assert health["overflow"] == 0
        assert health["repaired"] == 0
        assert health["pool_peak_bytes"] <= options.pool_bytes


def test_many_small_messages_at_once_overflow_nothing() -> None:
    count = 3_000

    def work(transport: UdpTransport) -> dict[str, Any]:
        group = Group(transport)
        if transport.rank == 0:
            tensors = [torch.zeros(3) for _ in range(count)]
            begun = [receive(group, tensor, 1, tag=index % 7) for index, tensor in enumerate(tensors)]
        else:
            begun = [send(group, torch.full((3,), float(index)), 0, tag=index % 7) for index in range(count)]
        for pending in begun:
            pending.wait()
        if transport.rank == 0:
            assert [tensor[0].item() for tensor in tensors] == list(range(count))
        return transport.health()

    for health in local_world(2, work):
        assert health["overflow"] == 0


def test_a_lone_fast_sender_does_not_starve_the_others() -> None:
    n = 4

    def work(transport: UdpTransport) -> float:
        group = Group(transport)
        big = torch.full((4_000_000,), float(transport.rank))
        pending = broadcast(group, big, 1)
        began = time.monotonic()
        for _ in range(20):
            barrier(group).wait()
        took = time.monotonic() - began
        pending.wait()
        assert bool((big == 1.0).all())
        return took

    # Three tries: a busy machine may be slow once. Who starves, starves always.
    assert any(max(local_world(n, work)) < 5.0 for _ in range(3))


def test_an_older_exchange_is_not_held_up_by_what_was_begun_after_it() -> None:
    def work(transport: Transport) -> tuple[float, float]:
        group = Group(transport)
        small = [torch.full((2,), float(transport.rank)) for _ in range(4)]
        first = all_to_all(group, [torch.zeros(2) for _ in range(4)], small)
        parts = [torch.ones(100_000) for _ in range(4)]
        second = all_to_all(group, [torch.zeros(100_000) for _ in range(4)], parts)
        return first.wait()[0].elapsed_s, second.wait()[0].elapsed_s

    # Windows of a datagram or two: whatever stands in a queue stands there for long.
    options = Options(datagram_bytes=1472, receive_buffer_bytes=16_384)
    results = [
        each for seed in range(6) for each in SimulatedNetwork(4, loss=0.2, seed=seed, options=options).run(work)
    ]
    first, second = (sorted(times) for times in zip(*results, strict=True))
    assert first[-1] < 0.3 * second[len(second) // 2]

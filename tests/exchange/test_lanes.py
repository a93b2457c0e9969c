"""Lanes: large messages are divided between sockets and threads of a rank, and the result does not show it."""

import hashlib
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import OPTIONS, SHARING, local_world, processes, wait_until_near

from stormtorch import LOSSY, Options, StormError, faults
from stormtorch.collectives import Group, Op, all_gather, all_reduce, all_to_all, broadcast, reduce_scatter
from stormtorch.udp.cards import Card, agree
from stormtorch.udp.udp import UdpTransport

KEY = bytes(range(32))
LARGE = 600_001
"""Elements of float32 that are divided between two lanes or more, in shards of three ranks, too."""
SHAPES = (LARGE, 3 * LARGE, 100_000, 17, 0)


def with_lanes(lanes: int, options: Options = OPTIONS, **changes: Any) -> Options:
    return replace(options, lanes=lanes, **changes)


def collectives(transport: UdpTransport) -> list[bytes]:
    """Digests of the results of large and small collectives in turn."""
    group = Group(transport)
    results: list[torch.Tensor] = []
    for turn, count in enumerate(SHAPES):
        for dtype in (torch.float32, torch.bfloat16):
            source = torch.Generator().manual_seed(10 * turn + transport.rank)
            own = (torch.randn(count, generator=source) * 100).to(dtype)
            all_reduce(group, summed := own.clone(), Op.AVG).wait()
            shard = torch.empty(count, dtype=dtype)
            reduce_scatter(group, shard, [own + peer for peer in range(group.size)], Op.SUM).wait()
            rooms = [torch.empty_like(own) for _ in range(group.size)]
            all_gather(group, rooms, own).wait()
            swapped = [torch.empty_like(own) for _ in range(group.size)]
            all_to_all(group, swapped, [own * peer for peer in range(group.size)]).wait()
            broadcast(group, told := own.clone(), turn % group.size).wait()
            results += [summed, shard, *rooms, *swapped, told]
    return [hashlib.blake2b(each.view(torch.uint8).numpy().tobytes()).digest() for each in results]


def near_collectives(transport: UdpTransport) -> tuple[list[bytes], list[int]]:
    wait_until_near(transport)
    return collectives(transport), transport.lane_bytes_sent()


@pytest.mark.slow
def test_results_have_the_same_bits_with_any_number_of_lanes() -> None:
    expected = local_world(3, collectives, options=with_lanes(1))
    for options in (with_lanes(2), with_lanes(3, datagram_bytes=1472), with_lanes(4, key=KEY)):
        assert local_world(3, collectives, options=options) == expected


@pytest.mark.thorough
def test_lanes_of_processes_that_share_memory_carry_about_the_same() -> None:
    expected = local_world(3, collectives, options=with_lanes(1))
    for (results, sent), alone in zip(
        processes(3, near_collectives, options=with_lanes(2, SHARING)), expected, strict=True
    ):
        assert results == alone
        # Small messages stay in the first lane.
        assert len(sent) == 2
        assert 0.7 < sent[1] / sent[0] < 1.0


def test_exact_collectives_survive_a_storm_in_all_lanes() -> None:
    expected = local_world(3, collectives, options=with_lanes(1))
    with faults(seed=3, loss=0.1, duplicate=0.03, reorder=0.03, corrupt=0.01):
        assert local_world(3, collectives, options=with_lanes(3, datagram_bytes=8972)) == expected


def test_what_lossy_parts_lose_is_counted_together() -> None:
    elements = 1_000_000

    def work(transport: UdpTransport) -> None:
        group = Group(transport)
        rooms = [torch.zeros(elements) for _ in range(2)]
        arrival = all_gather(group, rooms, torch.ones(elements), reliability=LOSSY).wait()[0]
        mask = arrival.mask(1 - transport.rank)
        chunk = transport.chunk_bytes // 4
        assert mask.numel() == -(-elements // chunk)
        # What the mask says of each chunk is what lies in memory.
        got = rooms[1 - transport.rank]
        assert torch.equal(got != 0, mask.repeat_interleave(chunk)[:elements])
        assert 0.85 < arrival.arrived < 0.95
        # Chunks of the lanes are lost independently.
        first, second = mask[: mask.numel() // 2], mask[mask.numel() // 2 :][: mask.numel() // 2]
        assert 0.75 < float((first & second).float().mean()) < 0.87

    with faults(seed=1, loss=0.1):
        local_world(2, work, options=with_lanes(2, datagram_bytes=1472))


@pytest.mark.parametrize("low", [False, True])
def test_parity_of_all_lanes_is_counted(low: bool) -> None:
    elements = 1_000_000

    def work(transport: UdpTransport) -> None:
        group = Group(transport, priority="low" if low else None)
        rooms = [torch.zeros(elements) for _ in range(2)]
        coded = replace(LOSSY, redundancy=0.5)
        arrival = all_gather(group, rooms, torch.ones(elements), reliability=coded).wait()[0]
        health = transport.health()
        # Half as much as data, but for what need not leave any more when all has come.
        assert health["parity_bytes"] > 0.4 * 4 * elements
        assert health["recovered"] == sum(arrival.recovered().values()) > 0

    options = with_lanes(1 if low else 4, datagram_bytes=1472, priority="both" if low else "normal")
    with faults(seed=1, loss=0.05):
        local_world(2, work, options=options)


def test_means_of_what_arrived_are_those_of_the_counts() -> None:
    def work(transport: UdpTransport) -> None:
        group = Group(transport)
        value = torch.full((900_000,), float(transport.rank + 1))
        all_reduce(group, value, Op.AVG, reliability=LOSSY).wait()
        means = {(a + b) / 2 for a in (1, 2, 3) for b in (1, 2, 3)} | {1.0, 2.0, 3.0}
        assert set(value.tolist()) <= means

    with faults(seed=2, loss=0.2):
        local_world(3, work, options=with_lanes(3, datagram_bytes=1472))


def test_all_ranks_use_the_smallest_number_of_lanes() -> None:
    def work(transport: UdpTransport) -> int:
        all_reduce(Group(transport), torch.ones(LARGE)).wait()
        return transport.lanes

    assert local_world(3, work, options=[with_lanes(4), with_lanes(2), with_lanes(3)]) == [2, 2, 2]


def test_exchanges_end_in_any_order_and_may_be_asked_about() -> None:
    def work(transport: UdpTransport) -> None:
        group = Group(transport)
        tensors = [torch.full((count,), 1.0) for count in (LARGE, 5, LARGE, LARGE, 1)]
        handles = [all_reduce(group, each) for each in tensors]
        for handle, tensor in reversed(list(zip(handles, tensors, strict=True))):
            while not handle.done():
                time.sleep(0.001)
            handle.wait()
            assert torch.equal(tensor, torch.full_like(tensor, 2.0))

    local_world(2, work, options=with_lanes(3))


@pytest.mark.thorough
def test_many_small_exchanges_between_two_large_ones_are_nothing_to_the_other_lanes() -> None:
    def work(transport: UdpTransport) -> None:
        group = Group(transport)
        for _ in range(3):
            all_reduce(group, large := torch.ones(LARGE)).wait()
            assert float(large.sum()) == 2 * LARGE
            for _ in range(2_500):
                all_reduce(group, small := torch.ones(1)).wait()
            assert float(small) == 2.0

    local_world(2, work, options=with_lanes(2))


@pytest.mark.parametrize("counts", [(LARGE, 3 * LARGE), (LARGE, 1000)])
def test_sizes_that_differ_are_an_error_on_both_ranks_at_once(counts: tuple[int, int]) -> None:
    def work(transport: UdpTransport) -> float:
        begin = time.monotonic()
        with pytest.raises(StormError, match="bytes"):
            all_reduce(Group(transport), torch.ones(counts[transport.rank])).wait()
        return time.monotonic() - begin

    assert max(local_world(2, work, options=with_lanes(4))) < 3.0


@pytest.mark.parametrize("options", [OPTIONS, SHARING])
def test_a_rank_that_goes_in_the_midst_is_named(options: Options) -> None:
    def work(transport: UdpTransport) -> None:
        group = Group(transport)
        if transport.rank == 2:
            transport.close()
            return
        with pytest.raises(StormError, match="rank 2"):
            for _ in range(1000):
                all_reduce(group, torch.ones(LARGE)).wait()

    local_world(3, work, options=with_lanes(2, options))


def test_a_wait_that_ends_too_early_can_be_repeated() -> None:
    def work(transport: UdpTransport) -> None:
        group = Group(transport)
        tensor = torch.ones(LARGE)
        if transport.rank == 1:
            time.sleep(0.5)
        exchange = all_reduce(group, tensor)
        if transport.rank == 0:
            with pytest.raises(StormError, match="not done"):
                exchange.wait(0.1)
        exchange.wait()
        assert float(tensor.sum()) == 2 * LARGE

    local_world(2, work, options=with_lanes(2))


def card(**changes: Any) -> Card:
    fields: dict[str, Any] = {
        "host": "198.18.0.1",
        "port": 1,
        "datagram_bytes": 1472,
        "chosen": False,
        "receive_buffer": 1 << 20,
        "eager_bytes": 1 << 18,
        "loopback": False,
        "checks_data": True,
        "nonce": "",
        "fingerprint": "",
        "machine": "a",
        "lanes": [2, 3, 4],
    }
    return Card(**fields | changes)


@pytest.mark.parametrize(
    ("lanes", "cards"),
    [
        (4, [card(cores=16), card(cores=16)]),
        (4, [card(cores=16)] * 4),
        (2, [card(cores=16)] * 8),
        (1, [card(cores=16)] * 16),
        (1, [card(cores=2)] * 2),
        # Between machines the line decides, too.
        (1, [card(cores=64, interface_mbit=10_000), card(cores=64, interface_mbit=10_000, machine="b")]),
        (2, [card(cores=64, interface_mbit=100_000), card(cores=64, interface_mbit=25_000, machine="b")]),
        (1, [card(cores=64), card(cores=64, machine="b")]),
        # Whoever chose a number gets it, unless others want fewer.
        (4, [card(), card(machine="b")]),
        (2, [card(), card(machine="b", lanes=[2])]),
        (1, [card(cores=16, machine=""), card()]),
    ],
)
def test_the_number_of_lanes_follows_from_cores_and_lines(lanes: int, cards: list[Card]) -> None:
    assert agree(cards).lanes == lanes


def test_impossible_numbers_of_lanes_are_refused() -> None:
    for lanes in (0, -1, 9):
        with pytest.raises(ValueError, match=r"lanes must lie in \[1, 8\]"):
            Options(lanes=lanes)
    with pytest.raises(ValueError, match="leave 3 ports below"):
        Options(lanes=3, port=65534)

"""Much at once: a hundred groups, ten thousand small tensors, a gigabyte, 64 ranks, all faults together."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import OPTIONS, local_world, processes

from reference import same_bits, values
from stormtorch import faults
from stormtorch.collectives import Group, Op, all_gather, all_reduce, broadcast, reduce_scatter
from stormtorch.udp.udp import UdpTransport

KEY = bytes(range(32))
GROUPS, TURNS = 100, 3
TENSORS = 10_000
GIGABYTE = 1 << 28  # elements of float32
RANKS, MOST_MB = 64, 20


def in_a_hundred_groups(transport: UdpTransport) -> list[list[float]]:
    """All calls are under way at once, and each rank begins and awaits the groups in an order of its own."""
    groups = [Group(transport, name=f"group {number}") for number in range(GROUPS)]
    draw = random.Random(transport.rank)
    tensors = [[torch.full((50 + number,), float(number + turn)) for turn in range(TURNS)] for number in range(GROUPS)]
    order = [number for number in range(GROUPS) for _ in range(TURNS)]
    draw.shuffle(order)
    turns = dict.fromkeys(range(GROUPS), 0)
    pending = []
    for number in order:
        pending.append(all_reduce(groups[number], tensors[number][turns[number]], Op.SUM))
        turns[number] += 1
    draw.shuffle(pending)
    for each in pending:
        each.wait()
    assert all(float(tensor.min()) == float(tensor.max()) for of_group in tensors for tensor in of_group)
    return [[float(tensor[0]) for tensor in of_group] for of_group in tensors]


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "sealed"])
def test_a_hundred_groups_with_calls_in_any_order_have_their_own_sums(key: bytes | None) -> None:
    options = replace(OPTIONS, key=key, datagram_bytes=1472)
    expected = [[3.0 * (number + turn) for turn in range(TURNS)] for number in range(GROUPS)]
    with faults(seed=3, loss=0.05):
        assert local_world(3, in_a_hundred_groups, options=options) == [expected] * 3


def ten_thousand_sums(transport: UdpTransport) -> tuple[bool, int]:
    """All of them are under way before the first is awaited."""
    group = Group(transport)
    sizes = [1 + number % 7 for number in range(TENSORS)]
    tensors = [torch.full((size,), float(number + transport.rank)) for number, size in enumerate(sizes)]
    pending = [all_reduce(group, tensor, Op.SUM) for tensor in tensors]
    for each in pending:
        each.wait()
    right = all(bool((tensor == 2.0 * number + 1.0).all()) for number, tensor in enumerate(tensors))
    return right, sum(len(tensor) for tensor in tensors)


@pytest.mark.slow
def test_ten_thousand_tiny_tensors_at_once_are_summed_at_loss() -> None:
    with faults(seed=4, loss=0.02):
        results = local_world(2, ten_thousand_sums, options=replace(OPTIONS, datagram_bytes=1472), within_s=100.0)
    assert [right for right, _ in results] == [True, True]


def sum_a_gigabyte(transport: UdpTransport) -> bool:
    tensor = torch.full((GIGABYTE,), 1.0 + transport.rank)
    tensor[:: GIGABYTE // 64] = float(transport.rank)
    all_reduce(Group(transport), tensor, Op.SUM).wait()
    right = bool((tensor[:: GIGABYTE // 64] == 1.0).all())
    tensor[:: GIGABYTE // 64] = 3.0
    return right and float(tensor.min()) == float(tensor.max()) == 3.0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_tensor_of_a_gigabyte_is_summed_as_a_small_one_is() -> None:
    options = replace(OPTIONS, timeout_s=200.0, silence_s=20.0)
    assert processes(2, sum_a_gigabyte, options=options, within_s=280.0) == [True, True]


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sixty_four_ranks_need_some_megabytes_each() -> None:
    """What all links, buffers and threads of a rank take, once each has exchanged something with all others."""
    before = resident_mb()

    def work(transport: UdpTransport) -> tuple[float, float]:
        tensor = torch.ones(100_000)
        all_reduce(Group(transport), tensor, Op.SUM).wait()
        all_reduce(Group(transport, name="again"), tensor, Op.MAX).wait()
        return float(tensor.min()), resident_mb()

    options = replace(OPTIONS, silence_s=60.0, timeout_s=200.0, lanes=1)
    said = local_world(RANKS, work, options=options, within_s=250.0)
    assert all(least == RANKS for least, _ in said)
    assert (max(mb for _, mb in said) - before) / RANKS < MOST_MB


def mixed(transport: UdpTransport) -> list[torch.Tensor]:
    group = Group(transport)
    kept: list[torch.Tensor] = []
    pending = []
    for turn, count in enumerate((600_001, 70_001, 17)):
        own = values(transport.rank + 10 * turn, count)
        summed, told = own.clone(), own.clone()
        shard = torch.empty(count)
        rooms = [torch.empty(count) for _ in range(group.size)]
        pending += [
            all_reduce(group, summed, Op.AVG),
            reduce_scatter(group, shard, [own + peer for peer in range(group.size)], Op.SUM),
            all_gather(group, rooms, own),
            broadcast(group, told, turn),
        ]
        kept += [summed, shard, *rooms, told]
    for each in pending:
        each.wait()
    return kept


@pytest.mark.thorough
@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "sealed"])
def test_three_lanes_under_all_faults_at_once_give_the_bits_of_one_without_any(key: bytes | None) -> None:
    expected = local_world(3, mixed, options=replace(OPTIONS, lanes=1))
    options = replace(OPTIONS, lanes=3, key=key, datagram_bytes=1472)
    with faults(seed=6, loss=0.1, reorder=0.3, duplicate=0.1, corrupt=0.02):
        found = local_world(3, mixed, options=options)
    for here, there in zip(found, expected, strict=True):
        assert all(same_bits(one, other) for one, other in zip(here, there, strict=True))

"""The collectives that move data, on every transport, and how all of them are misused."""

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import World

from reference import DTYPES, reduced, same_bits, values
from stormtorch import LOSSY
from stormtorch.collectives import (
    Group,
    Op,
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather,
    receive,
    reduce,
    reduce_scatter,
    scatter,
    send,
)
from stormtorch.exchange.exchange import Transport
from stormtorch.exchange.simulated import SimulatedNetwork

SIZES = [0, 1, 7, 1000, 40_000, 300_001]
CASES = [(size, torch.float32) for size in SIZES] + [(1000, dtype) for dtype in DTYPES]
worlds_of_up_to_five = pytest.mark.parametrize("n", [1, 2, 3, 4, 5])


def blank(size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((size,), 1, dtype=dtype)


def compare(n: int, by_rank: list[list[torch.Tensor]], expected: Callable[[int, int], torch.Tensor]) -> None:
    """Each rank's result of each case against `expected(case, rank)`."""
    for rank in range(n):
        assert len(by_rank[rank]) == len(CASES)
        for index, result in enumerate(by_rank[rank]):
            assert same_bits(result, expected(index, rank)), (CASES[index], rank)


@worlds_of_up_to_five
def test_broadcast_gives_everyone_the_tensor_of_the_root(world: World, n: int) -> None:
    def work(transport: Transport) -> list[torch.Tensor]:
        tensors = [values(transport.rank, *case) for case in CASES]
        for index, tensor in enumerate(tensors):
            broadcast(Group(transport), tensor, index % n).wait()
        return tensors

    compare(n, world(n, work), lambda index, rank: values(index % n, *CASES[index]))


@worlds_of_up_to_five
def test_all_gather_gives_everyone_everything_even_of_different_sizes(world: World, n: int) -> None:
    def given(rank: int, case: tuple[int, torch.dtype]) -> torch.Tensor:
        return values(rank, case[0] + 3 * rank, case[1])

    def work(transport: Transport) -> list[torch.Tensor]:
        group, results = Group(transport), []
        for case in CASES:
            outputs = [blank(case[0] + 3 * rank, case[1]) for rank in range(n)]
            all_gather(group, outputs, given(group.rank, case)).wait()
            results.append(torch.cat(outputs))
        return results

    compare(n, world(n, work), lambda index, _: torch.cat([given(rank, CASES[index]) for rank in range(n)]))


@pytest.mark.thorough
@worlds_of_up_to_five
def test_gather_gives_the_root_everything(world: World, n: int) -> None:
    def work(transport: Transport) -> list[torch.Tensor]:
        group, results = Group(transport), []
        for index, case in enumerate(CASES):
            outputs = [blank(*case) for _ in range(n)]
            mine = values(group.rank, *case)
            gather(group, mine, outputs if group.rank == index % n else None, index % n).wait()
            results.append(torch.cat(outputs) if group.rank == index % n else mine)
        return results

    def expected(index: int, rank: int) -> torch.Tensor:
        if rank != index % n:
            return values(rank, *CASES[index])
        return torch.cat([values(peer, *CASES[index]) for peer in range(n)])

    compare(n, world(n, work), expected)


@pytest.mark.thorough
@worlds_of_up_to_five
def test_scatter_gives_each_rank_its_part(world: World, n: int) -> None:
    def work(transport: Transport) -> list[torch.Tensor]:
        group, results = Group(transport), []
        for index, case in enumerate(CASES):
            inputs = [values(peer, *case, seed=7) for peer in range(n)] if group.rank == index % n else None
            results.append(blank(*case))
            scatter(group, results[-1], inputs, index % n).wait()
        return results

    compare(n, world(n, work), lambda index, rank: values(rank, *CASES[index], seed=7))


@pytest.mark.thorough
@worlds_of_up_to_five
def test_all_to_all_of_uneven_and_empty_parts_arrives_where_it_belongs(world: World, n: int) -> None:
    def part(source: int, target: int, case: tuple[int, torch.dtype]) -> torch.Tensor:
        size = 0 if (source + target) % 3 == 1 else case[0] // n + 5 * source + target
        return values(source, size, case[1], seed=target)

    def work(transport: Transport) -> list[torch.Tensor]:
        group, results = Group(transport), []
        for case in CASES:
            outputs = [torch.empty_like(part(source, group.rank, case)) for source in range(n)]
            all_to_all(group, outputs, [part(group.rank, target, case) for target in range(n)]).wait()
            results.append(torch.cat(outputs))
        return results

    compare(n, world(n, work), lambda index, rank: torch.cat([part(peer, rank, CASES[index]) for peer in range(n)]))


@pytest.mark.parametrize("n", [2, 5])
def test_messages_meet_by_tag_and_keep_their_order_within_one(world: World, n: int) -> None:
    def work(transport: Transport) -> list[torch.Tensor]:
        group = Group(transport)
        after, before = (group.rank + 1) % n, (group.rank - 1) % n
        sent = [
            send(group, values(group.rank, size, seed=tag), after, tag=tag) for tag in (5, 0) for size in (3, 0, 20_000)
        ]
        got = {tag: [torch.zeros(size) for size in (3, 0, 20_000)] for tag in (0, 5)}
        # The other tag first: what was sent before must not be in the way.
        received = [receive(group, tensor, before, tag=tag) for tag in (0, 5) for tensor in got[tag]]
        for pending in reversed(received + sent):
            pending.wait()
        return got[0] + got[5]

    for rank, got in enumerate(world(n, work)):
        wanted = [values((rank - 1) % n, size, seed=tag) for tag in (0, 5) for size in (3, 0, 20_000)]
        assert all(same_bits(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.thorough
@pytest.mark.parametrize("n", [1, 2, 4])
def test_nobody_passes_a_barrier_before_the_last_has_come(world: World, n: int) -> None:
    arrived: list[int] = []

    def work(transport: Transport) -> int:
        group = Group(transport)
        seen = []
        for _ in range(3):
            arrived.append(transport.rank)
            barrier(group).wait()
            seen.append(len(arrived))
            barrier(group).wait()
        return min(count - n * (turn + 1) for turn, count in enumerate(seen))

    assert world(n, work) == [0] * n


def test_collectives_in_flight_together_may_be_waited_for_in_any_order(world: World) -> None:
    n, count = 3, 12

    def work(transport: Transport) -> list[torch.Tensor]:
        group = Group(transport)
        tensors = [values(group.rank, 1 + 3_000 * index, seed=index) for index in range(count)]
        outputs = [[torch.empty_like(tensors[0]) for _ in range(n)] for _ in range(count)]
        begun = [all_reduce(group, tensor) for tensor in tensors]
        begun += [all_gather(group, outputs[index], tensors[0].clone()) for index in range(count)]
        begun += [barrier(group), broadcast(group, tensors[0].clone(), 1)]
        # Each rank in an order of its own.
        random.Random(group.rank).shuffle(begun)
        for pending in begun:
            pending.wait()
        return tensors

    for tensors in world(n, work):
        for index, tensor in enumerate(tensors):
            wanted = reduced([values(rank, 1 + 3_000 * index, seed=index) for rank in range(n)], Op.SUM)
            assert same_bits(tensor, wanted), index


def test_groups_of_some_ranks_work_beside_the_group_of_all(world: World) -> None:
    members = {"even": [4, 0, 2], "odd": [1, 3], "last": [4]}

    def work(transport: Transport) -> dict[str, torch.Tensor]:
        groups = {"all": Group(transport)}
        groups |= {
            name: Group(transport, ranks, name=name) for name, ranks in members.items() if transport.rank in ranks
        }
        tensors = {name: values(transport.rank, 30_000) for name in groups}
        begun = [all_reduce(group, tensors[name]) for name, group in groups.items()]
        for pending in reversed(begun):
            pending.wait()
        for name, group in groups.items():
            tensors[name + " root"] = values(transport.rank, 50)
            broadcast(group, tensors[name + " root"], group.size - 1).wait()
        return tensors

    for rank, tensors in enumerate(world(5, work)):
        for name, ranks in {"all": list(range(5)), **members}.items():
            if rank in ranks:
                # Of a group, the order is that of its ranks as given.
                assert same_bits(tensors[name], reduced([values(peer, 30_000) for peer in ranks], Op.SUM)), (name, rank)
                assert same_bits(tensors[name + " root"], values(ranks[-1], 50))


ROW = torch.zeros(4)
MISUSE: list[tuple[str, Callable[[Group], Any]]] = [
    (r"^tensor must be contiguous", lambda g: all_reduce(g, torch.zeros(4, 4).t())),
    (r"^tensor must be contiguous", lambda g: broadcast(g, torch.zeros(8)[::2], 0)),
    (r"^outputs\[1\] must be contiguous", lambda g: all_gather(g, [ROW, torch.zeros(8)[::2]], ROW)),
    (r"^inputs\[1\] must be contiguous", lambda g: reduce_scatter(g, ROW, [ROW, torch.zeros(8)[::2]])),
    (r"^tensor must be on the CPU", lambda g: all_reduce(g, torch.zeros(4, device="meta"))),
    (r"^root must lie in \[0, 2\), got 2", lambda g: broadcast(g, ROW, 2)),
    (r"^root must lie in \[0, 2\), got -1", lambda g: reduce(g, ROW, -1)),
    (r"^root must lie", lambda g: gather(g, ROW, None, 9)),
    (r"^root must lie", lambda g: scatter(g, ROW, None, 9)),
    (r"^target must be another rank than", lambda g: send(g, ROW, g.rank)),
    (r"^source must be another rank than", lambda g: receive(g, ROW, g.rank)),
    (r"^target must lie", lambda g: send(g, ROW, 2)),
    (r"^outputs must hold one tensor per rank, 2, got 1", lambda g: all_gather(g, [ROW], ROW)),
    (r"^outputs must hold one tensor per rank", lambda g: gather(g, ROW, None, g.rank)),
    (r"^inputs must hold one tensor per rank", lambda g: scatter(g, ROW, None, g.rank)),
    (r"^inputs must hold one tensor per rank", lambda g: reduce_scatter(g, ROW, [ROW])),
    (r"^inputs must hold one tensor per rank", lambda g: all_to_all(g, [ROW, ROW], [ROW])),
    (r"^outputs\[\d\] must have 1 x torch.float32", lambda g: gather(g, ROW[:1], [ROW, ROW], g.rank)),
    (r"^outputs\[\d\] must have 4 x torch.int32", lambda g: all_to_all(g, [ROW, ROW], [ROW.int(), ROW.int()])),
    (r"^outputs\[\d\] must have 4 x torch.float32", lambda g: all_gather(g, [ROW[:2], ROW[:2]], ROW)),
    (r"^inputs\[\d\] must have 4 x torch.float32", lambda g: scatter(g, ROW, [ROW[:2], ROW[:2]], g.rank)),
    (r"^output must have 4 x .* as inputs\[\d\] has, got 3", lambda g: reduce_scatter(g, ROW[:3], [ROW, ROW])),
    (r"^BAND needs integers or booleans, got torch.float32", lambda g: all_reduce(g, ROW, Op.BAND)),
    (r"^AVG needs numbers, got torch.bool", lambda g: all_reduce(g, ROW.bool(), Op.AVG)),
    (r"^MAX is not defined for torch.complex64", lambda g: reduce(g, ROW.to(torch.complex64), 0, Op.MAX)),
    (r"^SUM of torch.int64 must be exact", lambda g: all_reduce(g, ROW.long(), reliability=LOSSY)),
    (r"^MAX of torch.float32 must be exact", lambda g: all_reduce(g, ROW, Op.MAX, reliability=LOSSY)),
    (r"^broadcast of torch.int64 must be exact", lambda g: broadcast(g, ROW.long(), 0, reliability=LOSSY)),
    (r"^send of torch.bool must be exact", lambda g: send(g, ROW.bool(), 1 - g.rank, reliability=LOSSY)),
    (r"^ranks must be distinct ranks of a world of 2", lambda g: Group(g.transport, [0, 0])),
    (r"^ranks must be distinct ranks of a world of 2", lambda g: Group(g.transport, [0, 2])),
    (r"is not among the group's ranks", lambda g: Group(g.transport, [1 - g.rank])),
]


def test_misuse_is_an_error_that_names_the_argument_and_leaves_the_group_usable() -> None:
    def work(transport: Transport) -> list[str]:
        group, messages = Group(transport), []
        for pattern, call in MISUSE:
            with pytest.raises(ValueError) as caught:
                call(group).wait()
            messages.append(f"{pattern} -- {caught.value}")
        # A refused call takes part in nothing, not even in the count of calls.
        tensor = torch.ones(5)
        all_reduce(group, tensor).wait()
        return [*messages, str(tensor.tolist())]

    for messages in SimulatedNetwork(2).run(work):
        assert messages.pop() == str([2.0] * 5)
        for message in messages:
            pattern, _, said = message.partition(" -- ")
            assert re.search(pattern, said), message

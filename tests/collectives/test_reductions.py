"""All-reduce, reduce and reduce-scatter: exact on every transport, in every dtype, in rank order."""

from collections.abc import Iterable

import pytest
import torch
from conftest import World

from reference import DTYPES, ENGINE_DTYPES, divided, ops_of, reduced, same_bits, values
from stormtorch.collectives import Group, Op, Pending, all_reduce, reduce, reduce_scatter
from stormtorch.exchange.exchange import Transport
from stormtorch.exchange.simulated import SimulatedNetwork

pytestmark = pytest.mark.pure

SIZES = [0, 1, 7, 1000, 40_000, 300_001]
Case = tuple[int, torch.dtype, Op]
BY_SIZE: list[Case] = [(size, dtype, op) for size in SIZES for dtype in ENGINE_DTYPES for op in (Op.SUM, Op.AVG)]
BY_DTYPE: list[Case] = [(size, dtype, op) for size in (7, 20_000) for dtype in DTYPES for op in ops_of(dtype)]
CASES = list(dict.fromkeys(BY_SIZE + BY_DTYPE))
worlds_of_up_to_five = pytest.mark.parametrize("n", [1, 2, 3, 4, 5])


def wait_for(begun: Iterable[Pending]) -> None:
    """A few at a time, as most of the time in a storm is waiting."""
    under_way: list[Pending] = []
    for pending in begun:
        under_way.append(pending)
        if len(under_way) == 8:
            under_way.pop(0).wait()
    for pending in under_way:
        pending.wait()


def expected(n: int, case: Case) -> torch.Tensor:
    size, dtype, op = case
    return reduced([values(rank, size, dtype) for rank in range(n)], op)


@worlds_of_up_to_five
def test_all_reduce_gives_every_rank_the_reduction_in_rank_order(world: World, n: int) -> None:
    def work(transport: Transport) -> list[torch.Tensor]:
        group = Group(transport)
        results = [values(group.rank, size, dtype) for size, dtype, _ in CASES]
        wait_for(all_reduce(group, result, op) for result, (_, _, op) in zip(results, CASES, strict=True))
        return results

    by_rank = world(n, work)
    for case, *results in zip(CASES, *by_rank, strict=True):
        wanted = expected(n, case)
        assert [same_bits(result, wanted) for result in results] == [True] * n, case


@pytest.mark.thorough
@worlds_of_up_to_five
def test_reduce_gives_the_root_the_reduction_and_leaves_the_others_alone(world: World, n: int) -> None:
    def work(transport: Transport) -> list[torch.Tensor]:
        group = Group(transport)
        results = [values(group.rank, size, dtype) for size, dtype, _ in CASES]
        wait_for(reduce(group, results[index], index % n, op) for index, (_, _, op) in enumerate(CASES))
        return results

    by_rank = world(n, work)
    for index, (case, *results) in enumerate(zip(CASES, *by_rank, strict=True)):
        size, dtype, _ = case
        for rank, result in enumerate(results):
            wanted = expected(n, case) if rank == index % n else values(rank, size, dtype)
            assert same_bits(result, wanted), (case, rank)


@pytest.mark.thorough
@worlds_of_up_to_five
def test_reduce_scatter_gives_each_rank_its_part_of_the_reduction(world: World, n: int) -> None:
    def part(rank: int, target: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        # A target's part has a size of its own.
        return values(rank, size // n + target, dtype, seed=target + 1)

    def work(transport: Transport) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
        group = Group(transport)
        results = []
        for size, dtype, _ in CASES:
            inputs = [part(group.rank, target, size, dtype) for target in range(n)]
            results.append((torch.empty_like(inputs[group.rank]), inputs))
        wait_for(reduce_scatter(group, *result, op) for result, (_, _, op) in zip(results, CASES, strict=True))
        return results

    by_rank = world(n, work)
    for case, *results in zip(CASES, *by_rank, strict=True):
        size, dtype, op = case
        for target, (output, inputs) in enumerate(results):
            wanted = reduced([part(rank, target, size, dtype) for rank in range(n)], op)
            assert same_bits(output, wanted), (case, target)
            for other, given in enumerate(inputs):
                assert same_bits(given, part(target, other, size, dtype)), "inputs must stay as they are"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [2, 3])
def test_reduce_scatter_can_widen_halves_to_float32_without_rounding(world: World, n: int, dtype: torch.dtype) -> None:
    def work(transport: Transport) -> torch.Tensor:
        group = Group(transport)
        output = torch.empty(5_000)
        reduce_scatter(group, output, [values(group.rank, 5_000, dtype, seed=t) for t in range(n)]).wait()
        return output

    for target, output in enumerate(world(n, work)):
        wanted = reduced([values(rank, 5_000, dtype, seed=target).float() for rank in range(n)], Op.SUM)
        assert same_bits(output, wanted)


def test_tensors_may_start_at_any_element_and_have_any_shape(world: World) -> None:
    def work(transport: Transport) -> tuple[torch.Tensor, torch.Tensor]:
        group = Group(transport)
        around = torch.full((20_005,), -1, dtype=torch.bfloat16)
        around[3:20_003] = values(group.rank, 20_000, torch.bfloat16)
        all_reduce(group, around[3:20_003].view(4, 50, 100)).wait()
        scalar = torch.tensor(float(group.rank + 1))
        all_reduce(group, scalar).wait()
        return around, scalar

    wanted = reduced([values(rank, 20_000, torch.bfloat16) for rank in range(3)], Op.SUM)
    for around, scalar in world(3, work):
        assert same_bits(around[3:20_003], wanted)
        assert around[:3].tolist() + around[20_003:].tolist() == [-1.0] * 5, "nothing beside the tensor is touched"
        assert scalar.item() == 6.0


def test_special_values_pass_through_a_reduction() -> None:
    special = torch.tensor([float("inf"), float("-inf"), float("nan"), -0.0, 0.0, 1e-45, 3e38])

    def work(transport: Transport) -> list[torch.Tensor]:
        results = []
        for dtype in ENGINE_DTYPES:
            results.append(special.to(dtype) if transport.rank == 0 else -special.flip(0).to(dtype))
            all_reduce(Group(transport), results[-1]).wait()
        return results

    for results in SimulatedNetwork(2).run(work):
        for dtype, result in zip(ENGINE_DTYPES, results, strict=True):
            wanted = reduced([special.to(dtype), -special.flip(0).to(dtype)], Op.SUM)
            # Which NaN it is depends on the instruction set.
            assert torch.equal(result.isnan(), wanted.isnan())
            assert same_bits(result.nan_to_num(nan=7.0), wanted.nan_to_num(nan=7.0))


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
@pytest.mark.parametrize("op", [Op.SUM, Op.AVG, Op.PROD, Op.MIN, Op.MAX, Op.BAND, Op.BOR, Op.BXOR])
def test_wide_unsigned_integers_are_reduced_or_refused_before_anything_is_sent(dtype: torch.dtype, op: Op) -> None:
    def work(transport: Transport) -> list[int] | str:
        tensor = torch.tensor([3, 5 + transport.rank], dtype=dtype)
        try:
            pending = all_reduce(Group(transport), tensor, op)
        except ValueError as error:
            return str(error)
        pending.wait()
        return tensor.tolist()

    wanted = {
        Op.SUM: [6, 11],
        Op.AVG: [3, 5],
        Op.PROD: [9, 30],
        Op.MIN: [3, 5],
        Op.MAX: [3, 6],
        Op.BAND: [3, 4],
        Op.BOR: [3, 7],
        Op.BXOR: [0, 3],
    }
    for result in SimulatedNetwork(2).run(work):
        assert result == wanted[op] or str(dtype) in result


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64])
def test_average_of_unsigned_integers_is_the_quotient_of_their_sum(dtype: torch.dtype) -> None:
    largest = torch.iinfo(dtype).max
    rows = [[0, 1, 200, largest, largest // 2], [2, 1, 50, 0, largest // 2], [5, 0, 3, 0, 1]]

    def work(transport: Transport) -> list[int]:
        tensor = torch.tensor(rows[transport.rank], dtype=dtype)
        all_reduce(Group(transport), tensor, Op.AVG).wait()
        return tensor.tolist()

    assert SimulatedNetwork(3).run(work) == [[sum(column) // 3 for column in zip(*rows, strict=True)]] * 3


@pytest.mark.parametrize("dtype", [*ENGINE_DTYPES, torch.float64, torch.complex64, torch.int8, torch.int64])
def test_average_is_the_sum_divided_by_the_number_of_ranks_in_every_collective(dtype: torch.dtype) -> None:
    """The sum of halves is a float32, rounded after the division; of integers, the rest is dropped towards zero."""
    n, elements = 3, 3_000

    def contribution(rank: int) -> torch.Tensor:
        return values(rank, elements, dtype)

    def work(transport: Transport) -> list[torch.Tensor]:
        group = Group(transport)
        everywhere, rooted, wide = (contribution(group.rank) for _ in range(3))
        part = torch.empty(elements // n, dtype=dtype)
        all_reduce(group, everywhere, Op.AVG).wait()
        reduce(group, rooted, 0, Op.AVG).wait()
        reduce_scatter(group, part, list(wide.chunk(n)), Op.AVG).wait()
        return [everywhere, part, rooted]

    wide = torch.float32 if dtype in ENGINE_DTYPES else dtype
    total = contribution(0).to(wide) + contribution(1).to(wide) + contribution(2).to(wide)
    wanted = divided(total, n).to(dtype)
    for rank, (everywhere, part, rooted) in enumerate(SimulatedNetwork(n).run(work)):
        assert same_bits(everywhere, wanted)
        assert same_bits(part, wanted.chunk(n)[rank])
        assert rank != 0 or same_bits(rooted, wanted)

"""Quantised means in 8 or 4 bits: near the true mean, the same bits on every rank, and unbiased."""

from typing import Any

import pytest
import torch
from conftest import World, local_world, simulated

from stormtorch import Reliability
from stormtorch.collectives import Group, Op, all_reduce_on_grids, reduce, reduce_scatter_on_grids
from stormtorch.collectives.formats.grid import GRIDS
from stormtorch.collectives.wire import Wire
from stormtorch.exchange.exchange import Transport

LOSSY = Reliability(budget=1.0)
EXACT = Reliability(budget=0.0)
each_wire = pytest.mark.parametrize("wire", list(GRIDS), ids=str)


def contribution(rank: int, elements: int) -> torch.Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(rank))


@pytest.mark.thorough
@pytest.mark.parametrize("elements", [0, 1, 17, 5000, 100_003])
@pytest.mark.parametrize("op", [Op.AVG, Op.SUM])
@each_wire
def test_exact_delivery_gives_the_mean_within_the_grids_and_the_same_bits(
    world: World, wire: torch.dtype, elements: int, op: Op
) -> None:
    def work(transport: Transport) -> torch.Tensor:
        tensor = contribution(transport.rank, elements)
        all_reduce_on_grids(Group(transport), tensor, op, wire=wire, reliability=EXACT).wait()
        return tensor

    results = world(3, work)
    factor = 3.0 if op is Op.SUM else 1.0
    expected = factor * torch.stack([contribution(rank, elements) for rank in range(3)]).mean(0)
    assert all(torch.equal(each, results[0]) for each in results)
    # At most half a step of a range of about 9, once for each contribution and once for the result.
    assert torch.allclose(results[0], expected, atol=factor * 11.5 / GRIDS[wire].steps, rtol=0.0)
    if elements > 1000:
        assert not torch.equal(results[0], expected)  # it did travel on grids


@each_wire
def test_lossy_mean_is_over_what_arrived_and_all_ranks_have_the_same_bits(wire: torch.dtype) -> None:
    def work(transport: Transport) -> Any:
        tensor = contribution(transport.rank, 200_000)
        arrivals = all_reduce_on_grids(Group(transport), tensor, wire=wire, reliability=LOSSY).wait()
        return tensor, arrivals[0].fraction(stage=0), arrivals[0].fraction(stage=1)

    results = simulated(4, work, loss=0.2)
    assert all(torch.equal(each[0], results[0][0]) for each in results)
    assert all(0.7 < each[1] < 0.9 and each[2] == 1.0 for each in results)
    # Every element is the mean of at least the owner's own: nothing is zero-filled or left as it was.
    inputs = torch.stack([contribution(rank, 200_000) for rank in range(4)])
    near = 12.5 / GRIDS[wire].steps
    assert bool((results[0][0] <= inputs.amax(0) + near).all()) and bool((results[0][0] >= inputs.amin(0) - near).all())


@each_wire
def test_reduce_scatter_gives_each_rank_its_mean_and_writes_nothing_behind_it(wire: torch.dtype) -> None:
    def work(transport: Transport) -> torch.Tensor:
        inputs = [contribution(10 * transport.rank + peer, 3001) for peer in range(3)]
        memory = torch.full((3002,), 7.0)  # an odd number of four bits ends within a byte
        reduce_scatter_on_grids(Group(transport), memory[:3001], inputs, wire=wire, reliability=EXACT).wait()
        assert memory[3001] == 7.0
        return memory[:3001]

    for rank, output in enumerate(local_world(3, work)):
        expected = torch.stack([contribution(10 * peer + rank, 3001) for peer in range(3)]).mean(0)
        assert torch.allclose(output, expected, atol=6.4 / GRIDS[wire].steps, rtol=0.0)


@each_wire
def test_repeated_means_are_right_in_expectation(wire: torch.dtype) -> None:
    rounds, elements = 400, 500

    def work(transport: Transport) -> torch.Tensor:
        group, total = Group(transport), torch.zeros(elements, dtype=torch.float64)
        for _ in range(rounds):
            tensor = contribution(transport.rank, elements)
            all_reduce_on_grids(group, tensor, wire=wire, reliability=EXACT).wait()
            total += tensor
        return total / rounds

    mean = simulated(2, work)[0]
    error = mean - torch.stack([contribution(rank, elements) for rank in range(2)]).double().mean(0)
    # One round's error has a standard deviation of about a third of a step of a range of 6.5.
    assert float(error.abs().max()) < 6 * 0.36 * 6.6 / GRIDS[wire].steps / rounds**0.5
    assert abs(float(error.mean())) < 0.25 / GRIDS[wire].steps


def test_other_dtypes_and_operations_are_refused() -> None:
    def work(transport: Transport) -> None:
        group = Group(transport)
        with pytest.raises(ValueError, match="float32"):
            all_reduce_on_grids(group, torch.zeros(3, dtype=torch.bfloat16), wire=torch.int8, reliability=EXACT)
        with pytest.raises(ValueError, match=r"wire must be one of .*int4, got"):
            all_reduce_on_grids(group, torch.zeros(3), wire=torch.float16, reliability=EXACT)
        with pytest.raises(ValueError, match="MAX"):
            all_reduce_on_grids(group, torch.zeros(3), Op.MAX, wire=torch.int8, reliability=EXACT)
        with pytest.raises(ValueError, match="one tensor per rank"):
            reduce_scatter_on_grids(group, torch.zeros(3), [torch.zeros(3)], wire=torch.int8, reliability=EXACT)

    simulated(2, work)


def test_torchs_default_device_is_not_where_buffers_go() -> None:
    def work(transport: Transport) -> torch.Tensor:
        tensor, other = contribution(transport.rank, 5000), torch.ones(5000)
        with torch.device("meta"):  # as a model that is built without memory is
            all_reduce_on_grids(Group(transport), tensor, wire=torch.int8, reliability=EXACT).wait()
            reduce(Group(transport), other, 0).wait()
        return tensor if transport.rank else other

    results = simulated(2, work)
    assert float(results[0].sum()) == 10_000.0
    expected = torch.stack([contribution(rank, 5000) for rank in range(2)]).mean(0)
    assert torch.allclose(results[1], expected, atol=0.045, rtol=0.0)


@each_wire
def test_bytes_of_strangers_become_numbers_or_none_and_touch_nothing_else(wire: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    there, elements = Wire(wire, 1400), 4001
    for _ in range(50):
        message = there.room(elements)
        message.view(torch.uint8).random_(0, 256, generator=generator)
        memory = torch.full((elements + 2,), 7.0)
        there.place(message, memory[1:-1], torch.ones(there.chunks(elements), dtype=torch.bool))
        assert memory[0] == memory[-1] == 7.0
    grid = there.encode(torch.randn(elements, generator=generator), 1)
    grid[0] = torch.nan  # the place of the first block's grid
    values = torch.empty(elements)
    there.decode(grid, values)
    block = GRIDS[wire].block_elements
    assert bool(values[:block].isnan().all()) and bool(values[block:].isfinite().all())


@each_wire
def test_a_message_has_the_bytes_that_are_told_of_an_element(wire: torch.dtype) -> None:
    grids = GRIDS[wire]
    assert grids.message_bytes(1_000_000, 1440) == pytest.approx(1_000_000 * grids.element_bytes, rel=0.01)
    assert grids.element_bytes < {8: 1.01, 4: 0.57}[grids.bits]

"""Means that travel as eight bits: near the true mean, the same bits everywhere, and right in expectation."""

from typing import Any

import pytest
import torch
from conftest import World, local_world, simulated

from stormtorch import Reliability
from stormtorch.collectives import Group, Op, all_reduce_int8, reduce, reduce_scatter_int8
from stormtorch.transport.exchange import Transport

LOSSY = Reliability(budget=1.0)
EXACT = Reliability(budget=0.0)


def contribution(rank: int, elements: int) -> torch.Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("elements", [0, 1, 17, 5000, 100_003])
@pytest.mark.parametrize("op", [Op.AVG, Op.SUM])
def test_exact_delivery_gives_the_mean_within_the_grids_and_the_same_bits(world: World, elements: int, op: Op) -> None:
    def work(transport: Transport) -> torch.Tensor:
        tensor = contribution(transport.rank, elements)
        all_reduce_int8(Group(transport), tensor, op, reliability=EXACT).wait()
        return tensor

    results = world(3, work)
    factor = 3.0 if op is Op.SUM else 1.0
    expected = factor * torch.stack([contribution(rank, elements) for rank in range(3)]).mean(0)
    assert all(torch.equal(each, results[0]) for each in results)
    # At most half a step of about 9 / 254, once for each contribution and once for the result.
    assert torch.allclose(results[0], expected, atol=factor * 0.045, rtol=0.0)
    if elements > 1000:
        assert not torch.equal(results[0], expected)  # it did travel as int8


def test_lossy_mean_is_over_what_arrived_and_all_ranks_have_the_same_bits() -> None:
    def work(transport: Transport) -> Any:
        tensor = contribution(transport.rank, 200_000)
        arrivals = all_reduce_int8(Group(transport), tensor, reliability=LOSSY).wait()
        return tensor, arrivals[0].fraction(stage=0), arrivals[0].fraction(stage=1)

    results = simulated(4, work, loss=0.2)
    assert all(torch.equal(each[0], results[0][0]) for each in results)
    assert all(0.7 < each[1] < 0.9 and each[2] == 1.0 for each in results)
    # Every element is the mean of at least the owner's own: nothing is zero-filled or left as it was.
    inputs = torch.stack([contribution(rank, 200_000) for rank in range(4)])
    assert bool((results[0][0] <= inputs.amax(0) + 0.05).all()) and bool((results[0][0] >= inputs.amin(0) - 0.05).all())


def test_reduce_scatter_gives_each_rank_its_mean() -> None:
    def work(transport: Transport) -> torch.Tensor:
        inputs = [contribution(10 * transport.rank + peer, 3001) for peer in range(3)]
        output = torch.empty(3001)
        reduce_scatter_int8(Group(transport), output, inputs, reliability=EXACT).wait()
        return output

    for rank, output in enumerate(local_world(3, work)):
        expected = torch.stack([contribution(10 * peer + rank, 3001) for peer in range(3)]).mean(0)
        assert torch.allclose(output, expected, atol=0.025, rtol=0.0)


def test_repeated_means_are_right_in_expectation() -> None:
    rounds, elements = 400, 500

    def work(transport: Transport) -> torch.Tensor:
        group, total = Group(transport), torch.zeros(elements, dtype=torch.float64)
        for _ in range(rounds):
            tensor = contribution(transport.rank, elements)
            all_reduce_int8(group, tensor, reliability=EXACT).wait()
            total += tensor
        return total / rounds

    mean = simulated(2, work)[0]
    error = mean - torch.stack([contribution(rank, elements) for rank in range(2)]).double().mean(0)
    # One round's error has a standard deviation of about a third of a step of 6.5 / 254.
    assert float(error.abs().max()) < 6 * 0.36 * 0.026 / rounds**0.5
    assert abs(float(error.mean())) < 0.001


def test_other_dtypes_and_operations_are_refused() -> None:
    def work(transport: Transport) -> None:
        group = Group(transport)
        with pytest.raises(ValueError, match="float32"):
            all_reduce_int8(group, torch.zeros(3, dtype=torch.bfloat16), reliability=EXACT)
        with pytest.raises(ValueError, match="MAX"):
            all_reduce_int8(group, torch.zeros(3), Op.MAX, reliability=EXACT)
        with pytest.raises(ValueError, match="one tensor per rank"):
            reduce_scatter_int8(group, torch.zeros(3), [torch.zeros(3)], reliability=EXACT)

    simulated(2, work)


def test_torchs_default_device_is_not_where_buffers_go() -> None:
    def work(transport: Transport) -> torch.Tensor:
        tensor, other = contribution(transport.rank, 5000), torch.ones(5000)
        with torch.device("meta"):  # as a model that is built without memory is
            all_reduce_int8(Group(transport), tensor, reliability=EXACT).wait()
            reduce(Group(transport), other, 0).wait()
        return tensor if transport.rank else other

    results = simulated(2, work)
    assert float(results[0].sum()) == 10_000.0
    expected = torch.stack([contribution(rank, 5000) for rank in range(2)]).mean(0)
    assert torch.allclose(results[1], expected, atol=0.045, rtol=0.0)

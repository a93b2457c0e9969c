"""Collectives of a view: they wait for silent ranks, and go on without those that a later view drops."""

import pytest
import torch

from reference import same_bits
from stormtorch import Options, Reliability
from stormtorch.collectives import Group, Op, all_gather, all_reduce, barrier, broadcast, reduce_scatter
from stormtorch.errors import ExchangeTimeout, Interrupted
from stormtorch.exchange.simulated import SimulatedNetwork, SimulatedTransport
from stormtorch.exchange.waiting import UNCLEAR_S

pytestmark = pytest.mark.pure

QUICK = Options(datagram_bytes=1472, silence_s=2.0, timeout_s=600.0)
WORLD = 4
DARK = 2


def contribution(rank: int, elements: int) -> torch.Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(rank)) * 10.0**rank


def summed(elements: int, ranks: list[int]) -> torch.Tensor:
    total = contribution(ranks[0], elements)
    for rank in ranks[1:]:
        total = total + contribution(rank, elements)
    return total


def pause(transport: SimulatedTransport, seconds: float) -> None:
    """Lets virtual time pass on a rank: no view has such a number."""
    assert not transport.wait_view(1 << 31, seconds)


def begin(network: SimulatedNetwork, transport: SimulatedTransport) -> Group:
    """Makes the group of the first view, and cuts one rank off for good once all have reached each other."""
    transport.watch()
    pause(transport, 0.5)
    view = transport.view()
    assert view is not None
    assert view.number == 1
    assert view.members == [(rank, 0) for rank in range(WORLD)]
    network.set_unreachable(DARK, True)
    return Group(transport, view=view.number)


def run_without_one(collective: object, elements: int) -> list[torch.Tensor | None]:
    network = SimulatedNetwork(WORLD, options=QUICK, rate="400mbit", seed=1)

    def work(transport: SimulatedTransport) -> torch.Tensor | None:
        group = begin(network, transport)
        if transport.rank == DARK:
            return None
        pending, result = collective(group, elements)  # type: ignore[operator]
        with pytest.raises(ExchangeTimeout):
            pending.wait(1.0)  # the others wait for it, as no rank knows yet that it is lost
        pending.wait()
        view = transport.view()
        assert view is not None
        assert view.number > 1
        assert [rank for rank, _ in view.members] == [0, 1, 3]
        return result  # type: ignore[no-any-return]

    return network.run(work)


@pytest.mark.parametrize("elements", [1_000, 200_000])
def test_exact_sum_is_over_the_ranks_of_the_later_view_in_rank_order(elements: int) -> None:
    def collective(group: Group, elements: int) -> object:
        tensor = contribution(group.rank, elements)
        return all_reduce(group, tensor), tensor

    results = run_without_one(collective, elements)
    expected = summed(elements, [0, 1, 3])
    lost = slice(elements // WORLD * DARK, elements // WORLD * (DARK + 1)) if elements > 10_000 else slice(0, 0)
    for rank in (0, 1, 3):
        result = results[rank]
        assert result is not None
        # What the lost owner would have shared is not there: the rank's own values stand in its place.
        expected[lost] = contribution(rank, elements)[lost]
        assert same_bits(result, expected)


def test_reduce_scatter_goes_on_without_a_rank_that_is_lost() -> None:
    def collective(group: Group, elements: int) -> object:
        output = torch.empty(elements)
        inputs = [contribution(group.rank, elements) + owner for owner in range(WORLD)]
        return reduce_scatter(group, output, inputs, op=Op.AVG), output

    results = run_without_one(collective, 5_000)
    for rank in (0, 1, 3):
        result = results[rank]
        assert result is not None
        expected = (contribution(0, 5_000) + rank) + (contribution(1, 5_000) + rank) + (contribution(3, 5_000) + rank)
        assert same_bits(result, expected / 3)


def test_all_gather_leaves_the_place_of_a_lost_rank_as_it_was() -> None:
    def collective(group: Group, elements: int) -> object:
        outputs = torch.full((WORLD, elements), -1.0)
        return all_gather(group, list(outputs), contribution(group.rank, elements)), outputs

    results = run_without_one(collective, 3_000)
    for rank in (0, 1, 3):
        result = results[rank]
        assert result is not None
        for other in range(WORLD):
            expected = torch.full((3_000,), -1.0) if other == DARK else contribution(other, 3_000)
            assert same_bits(result[other], expected)


@pytest.mark.parametrize("op", [Op.MAX, Op.SUM])
def test_what_torch_reduces_leaves_a_lost_rank_out(op: Op) -> None:
    def collective(group: Group, elements: int) -> object:
        tensor = torch.full((elements,), group.rank + 1, dtype=torch.int64)
        return all_reduce(group, tensor, op=op), tensor

    results = run_without_one(collective, 100)
    for rank in (0, 1, 3):
        result = results[rank]
        assert result is not None
        assert bool((result == (4 if op is Op.MAX else 1 + 2 + 4)).all())


@pytest.mark.parametrize("outage_s", [12.0, 40.0, 120.0])
def test_outage_of_all_links_heals_within_a_second(outage_s: float) -> None:
    network = SimulatedNetwork(3, options=QUICK, rate="400mbit", loss=0.1, seed=2)

    def work(transport: SimulatedTransport) -> float:
        transport.watch()
        group = Group(transport, view=1)
        tensor = contribution(transport.rank, 100_000)
        pending = all_reduce(group, tensor)
        with pytest.raises(ExchangeTimeout):
            pending.wait(0.002)
        for rank in range(3):
            network.set_unreachable(rank, True)
        with pytest.raises(ExchangeTimeout):
            pending.wait(outage_s)
        for rank in range(3):
            network.set_unreachable(rank, False)
        healed_s = network.now_s
        pending.wait()
        assert same_bits(tensor, summed(100_000, [0, 1, 2]))
        return network.now_s - healed_s

    assert max(network.run(work)) < 1.3


def test_lossy_collective_of_a_view_ends_at_its_deadline_while_a_peer_is_away() -> None:
    network = SimulatedNetwork(2, options=QUICK, seed=3)

    def work(transport: SimulatedTransport) -> float:
        transport.watch()
        network.set_unreachable(1, True)
        group = Group(transport, view=1)
        tensor = torch.ones(1_000)
        lossy = Reliability(budget=1.0, deadline_s=0.25)
        return all_reduce(group, tensor, op=Op.AVG, reliability=lossy, share=lossy).wait()[0].elapsed_s

    assert all(0.2 < elapsed_s < 0.6 for elapsed_s in network.run(work))


def test_wait_is_interrupted_and_the_others_wait_on() -> None:
    network = SimulatedNetwork(3, options=QUICK, seed=4)
    stop = {0: 0.5}

    def work(transport: SimulatedTransport) -> str:
        transport.watch()
        begun_s = network.now_s

        def interrupted() -> bool:
            return network.now_s - begun_s > stop.get(transport.rank, 1.0)

        group = Group(transport, view=1, interrupted=interrupted)
        if transport.rank == 2:
            pause(transport, 2.0)
            return ""
        pending = broadcast(group, torch.zeros(100_000), 2)
        for _ in range(2):  # and again at the next call
            with pytest.raises(Interrupted, match=r"rank \d: broadcast .* was interrupted"):
                pending.wait()
        # Rank 2 may yet begin: that is waited for a while.
        assert 0.0 < network.now_s - begun_s - stop.get(transport.rank, 1.0) < UNCLEAR_S + 0.3
        assert pending.done()
        return "interrupted"

    assert network.run(work) == ["interrupted", "interrupted", ""]


def test_turned_group_keeps_its_view() -> None:
    network = SimulatedNetwork(2, options=QUICK)

    def work(transport: SimulatedTransport) -> bool:
        def never() -> bool:
            return False

        group = Group(transport, view=1, interrupted=never).reordered([1, 0])
        barrier(group).wait()
        return group.view == 1 and group.interrupted is never

    assert all(network.run(work))

"""How much may be missing and for how long: budgets, deadlines, and what stays where nothing arrived."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from reference import same_bits, values
from stormtorch import EXACT, LOSSY, Options, Reliability
from stormtorch.collectives import Group, Op, all_gather, all_reduce, barrier, broadcast, reduce, reduce_scatter
from stormtorch.exchange.exchange import ExchangeResult, Transport
from stormtorch.exchange.simulated import SimulatedNetwork

SMALL = Options(datagram_bytes=256, silence_s=5.0, timeout_s=60.0)
CHUNK = SimulatedNetwork(2, options=SMALL).chunk_bytes // 4
SLOW: dict[str, Any] = {"rate": "10mbit", "options": Options(datagram_bytes=256, rate="unlimited", timeout_s=60.0)}
"""A link that needs about 0.2 ms for a chunk."""


def missing(arrival: ExchangeResult, peer: int, *, stage: int = 0) -> int:
    return int((~arrival.mask(peer, stage=stage)).sum())


@pytest.mark.parametrize("budget", [0.01, 0.05, 0.15])
def test_a_budget_is_repaired_to_and_no_further(budget: float) -> None:
    n, chunks = 3, 200

    def work(transport: Transport) -> list[int]:
        group = Group(transport)
        outputs = [torch.zeros(chunks * CHUNK) for _ in range(n)]
        tensor = values(group.rank, chunks * CHUNK)
        arrival = all_gather(group, outputs, tensor, reliability=Reliability(budget=budget)).wait()[0]
        assert 0 < arrival.repaired < 0.5 * (n - 1) * chunks
        for peer in range(n):
            if peer != group.rank:
                arrived = arrival.mask(peer).repeat_interleave(CHUNK)
                assert same_bits(outputs[peer], torch.where(arrived, values(peer, chunks * CHUNK), 0.0))
        return [missing(arrival, peer) for peer in range(n) if peer != group.rank]

    found = [count for counts in SimulatedNetwork(n, loss=0.2, options=SMALL, seed=9).run(work) for count in counts]
    assert max(found) <= int(budget * chunks)
    assert max(found) > 0, "what the budget allows is not repaired"


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("budget", [0.05, 0.3])
def test_a_budget_holds_for_every_collective_that_may_lose(n: int, budget: float) -> None:
    reliability = Reliability(budget=budget)
    elements = n * 100 * CHUNK

    def work(transport: Transport) -> list[ExchangeResult]:
        group = Group(transport)
        mine = values(group.rank, elements)
        begun = [
            all_reduce(group, mine.clone(), Op.AVG, reliability=reliability),
            broadcast(group, mine.clone(), 0, reliability=reliability),
            reduce(group, mine.clone(), 1, reliability=reliability),
            reduce_scatter(group, torch.empty(elements // n), list(mine.chunk(n)), reliability=reliability),
        ]
        return [arrival for pending in begun for arrival in pending.wait()]

    for arrivals in SimulatedNetwork(n, loss=0.2, options=SMALL, seed=10).run(work):
        for arrival in arrivals:
            for message in arrival._outcome.arrivals:
                assert message.chunks - message.arrived <= budget * message.chunks, (message.peer, message.second_stage)


def test_an_exchange_ends_at_its_deadline_with_what_has_arrived() -> None:
    chunks = 100

    def work(transport: Transport) -> tuple[ExchangeResult, torch.Tensor]:
        group = Group(transport)
        outputs = [torch.full((chunks * CHUNK,), -7.0) for _ in range(2)]
        reliability = Reliability(budget=0.05, deadline_s=0.010)
        arrival = all_gather(group, outputs, torch.ones(chunks * CHUNK), reliability=reliability).wait()[0]
        return arrival, outputs[1 - group.rank]

    for rank, (arrival, output) in enumerate(SimulatedNetwork(2, seed=11, **SLOW).run(work)):
        assert arrival.elapsed_s == pytest.approx(0.010, abs=1e-4)
        assert 20 < missing(arrival, 1 - rank) < 80, "the budget gives way to the deadline"
        arrived = arrival.mask(1 - rank).repeat_interleave(CHUNK)
        assert torch.equal(output, torch.where(arrived, 1.0, -7.0)), "what is missing keeps its old value"


def test_the_shorter_deadline_of_two_ranks_ends_the_exchange_for_both() -> None:
    def work(transport: Transport) -> ExchangeResult:
        group = Group(transport)
        outputs = [torch.empty(2000 * CHUNK) for _ in range(2)]
        reliability = Reliability(budget=1.0, deadline_s=0.010 if transport.rank == 0 else 10.0)
        arrival = all_gather(group, outputs, torch.ones(2000 * CHUNK), reliability=reliability).wait()[0]
        barrier(group).wait()  # a rank that says goodbye would end the exchange as well
        return arrival

    paced = {
        **SLOW,
        "options": replace(SLOW["options"], rate=SLOW["rate"]),
    }  # not all of it in the line's queue at once
    first, second = SimulatedNetwork(2, seed=11, **paced).run(work)
    assert first.elapsed_s == pytest.approx(0.010, abs=1e-4)
    assert second.elapsed_s < 0.05, "it is told, and does not find out by asking, which takes 0.17 s"
    assert missing(second, 0) > 1000


def test_a_deadline_that_is_not_needed_does_not_delay() -> None:
    def work(transport: Transport) -> ExchangeResult:
        tensor = values(transport.rank, 5_000)
        reliability = Reliability(budget=0.0, deadline_s=30.0)
        return all_reduce(Group(transport), tensor, Op.AVG, reliability=reliability, share=reliability).wait()[0]

    for arrival in SimulatedNetwork(3, loss=0.1, options=SMALL, seed=12).run(work):
        assert arrival.arrived == 1.0
        assert arrival.elapsed_s < 1.0


@pytest.mark.slow
def test_a_lossy_exchange_takes_no_longer_for_its_losses() -> None:
    def elapsed(loss: float) -> float:
        def work(transport: Transport) -> float:
            group, times = Group(transport), []
            for _ in range(20):
                tensor = values(group.rank, 150_000)
                times.append(all_reduce(group, tensor, Op.AVG, reliability=LOSSY).wait()[0].elapsed_s)
            return sorted(times)[len(times) // 2]

        return max(SimulatedNetwork(4, loss=loss, delay_s=5e-3, options=SMALL, seed=13).run(work))

    # One way is 5 ms and there are two stages; a repair would cost at least a round trip more.
    assert elapsed(0.0) < 0.012
    assert elapsed(0.2) < 0.017


@pytest.mark.parametrize("elements", [5_000, 150_000])
def test_a_sum_is_the_mean_times_the_world(elements: int) -> None:
    def run(op: Op) -> list[torch.Tensor]:
        def work(transport: Transport) -> torch.Tensor:
            tensor = values(transport.rank, elements)
            all_reduce(Group(transport), tensor, op, reliability=LOSSY).wait()
            return tensor

        return SimulatedNetwork(4, loss=0.2, options=SMALL, seed=14).run(work)

    # Four is a power of two, so the factor rounds nothing.
    for total, mean in zip(run(Op.SUM), run(Op.AVG), strict=True):
        assert same_bits(total, 4 * mean)


@pytest.mark.parametrize("n", [2, 4])
def test_broadcast_keeps_the_stale_chunk_where_an_update_is_lost(n: int) -> None:
    owners, chunks = max(n - 1, 1), 120
    shard = chunks * CHUNK

    def work(transport: Transport) -> tuple[torch.Tensor, ExchangeResult]:
        tensor = values(transport.rank, owners * shard)
        arrival = broadcast(Group(transport), tensor, 0, reliability=LOSSY).wait()[0]
        return tensor, arrival

    results = SimulatedNetwork(n, loss=0.2, options=SMALL, seed=15).run(work)
    assert same_bits(results[0][0], values(0, owners * shard)), "the root's own is never touched"
    for rank in range(1, n):
        tensor, arrival = results[rank]
        # With two ranks the root sends it all; with more, rank r passes shard r - 1 on.
        masks = [arrival.mask(0) if owner in (rank, 0) else arrival.mask(owner, stage=1) for owner in range(1, n)]
        arrived = torch.cat(masks).repeat_interleave(CHUNK)
        assert same_bits(tensor, torch.where(arrived, values(0, owners * shard), values(rank, owners * shard)))
        for owner, mask in enumerate(masks, start=1):
            expected = 0.8 if owner == rank else 0.64
            assert abs(float(mask.float().mean()) - expected) < 0.13
            if owner != rank:
                assert not bool((mask & ~results[owner][1].mask(0)).any()), "nobody passes on what it never got"


@pytest.mark.parametrize("reliability", [LOSSY, Reliability(budget=0.1), Reliability(budget=1.0, deadline_s=0.004)])
def test_an_exact_share_gives_identical_bits_although_the_first_stage_loses(reliability: Reliability) -> None:
    def work(transport: Transport) -> tuple[torch.Tensor, ExchangeResult]:
        tensor = values(transport.rank, 40_000)
        arrival = all_reduce(Group(transport), tensor, Op.AVG, reliability=reliability, share=EXACT).wait()[0]
        return tensor, arrival

    results = SimulatedNetwork(4, loss=0.2, options=SMALL, seed=16).run(work)
    for tensor, arrival in results:
        assert same_bits(tensor, results[0][0])
        assert arrival.fraction(stage=1) == 1.0
        assert arrival.fraction(stage=0) < 1.0


def test_a_lossy_reduce_tells_the_root_the_mean_of_what_its_owners_got() -> None:
    n, chunks = 3, 32
    shard = chunks * CHUNK

    def work(transport: Transport) -> tuple[torch.Tensor, torch.Tensor]:
        tensor = torch.full((n * shard,), float(4**transport.rank))
        arrival = reduce(Group(transport), tensor, 1, Op.AVG, reliability=LOSSY).wait()[0]
        return tensor, arrival.counts()

    results: list[Any] = SimulatedNetwork(n, loss=0.3, options=SMALL, seed=17).run(work)
    means = results[1][0].view(n, chunks, CHUNK)
    for owner in range(n):
        for chunk, count in enumerate(results[owner][1].tolist()):
            own, others = 4.0**owner, [4.0**rank for rank in range(n) if rank != owner]
            possible = {1: [own], 2: [(own + other) / 2 for other in others], 3: [(1.0 + 4.0 + 16.0) * (1 / 3)]}[count]
            assert any(torch.allclose(means[owner, chunk], torch.tensor(each), rtol=1e-6) for each in possible)
    for rank in (0, 2):
        assert torch.equal(results[rank][0], torch.full((n * shard,), float(4**rank)))


def test_wrong_reliabilities_are_refused_by_name() -> None:
    for budget in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match=r"^budget must"):
            Reliability(budget=budget)
    for deadline_s in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=r"^deadline_s must"):
            Reliability(deadline_s=deadline_s)
    assert EXACT.exact
    assert not LOSSY.exact
    assert not Reliability(deadline_s=1.0).exact


@pytest.mark.parametrize("redundancy", [-0.1, 4.5, float("nan"), "much", None])
def test_a_redundancy_that_makes_no_sense_is_refused(redundancy: Any) -> None:
    with pytest.raises(ValueError, match="redundancy must lie in"):
        Reliability(redundancy=redundancy)

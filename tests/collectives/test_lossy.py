"""What a lossy exchange delivers: loss at the rate of the network, spread evenly, means without bias, budgets kept."""

import math
from typing import Any

import pytest
import torch

from reference import same_bits
from stormtorch import LOSSY, Options, Reliability
from stormtorch.collectives import Group, Op, all_gather, all_reduce, reduce_scatter
from stormtorch.exchange.exchange import Transport
from stormtorch.exchange.simulated import SimulatedNetwork
from stormtorch.network.loss import GilbertElliott

SMALL = Options(datagram_bytes=256, silence_s=5.0)
"""Many small chunks make good statistics."""
CHUNK = SimulatedNetwork(2, options=SMALL).chunk_bytes // 4
"""Elements of float32 in one chunk."""
Z = 3.29
"""Two-sided 99.9 % of the normal distribution. Seeds are fixed, so a test that passes always passes."""


def chi_square_limit(degrees: int) -> float:
    """99.9 % of the chi-square distribution, by Wilson and Hilferty."""
    spread = 2.0 / (9.0 * degrees)
    return float(degrees * (1.0 - spread + 3.09 * math.sqrt(spread)) ** 3)


def by_element(per_chunk: torch.Tensor, elements: int) -> torch.Tensor:
    return per_chunk.repeat_interleave(CHUNK)[:elements]


def t_of(errors: torch.Tensor) -> float:
    """Student's t of the hypothesis that the mean error is zero."""
    return float(errors.mean() / (errors.std() / math.sqrt(errors.numel())))


@pytest.mark.thorough
@pytest.mark.parametrize("loss", [0.01, 0.1, 0.4])
def test_chunks_arrive_at_the_rate_of_the_network(loss: float) -> None:
    n, chunks = 4, 3_000

    def work(transport: Transport) -> list[int]:
        group = Group(transport)
        outputs = [torch.zeros(chunks * CHUNK) for _ in range(n)]
        arrival = all_gather(group, outputs, torch.ones(chunks * CHUNK), reliability=LOSSY).wait()[0]
        arrived = [int(arrival.mask(peer).sum()) for peer in range(n) if peer != group.rank]
        assert arrival.arrived == sum(arrived) / (len(arrived) * chunks)
        return arrived

    arrived = [count for counts in SimulatedNetwork(n, loss=loss, options=SMALL, seed=5).run(work) for count in counts]
    spread = math.sqrt(chunks * loss * (1.0 - loss))
    for count in arrived:
        assert abs(count - chunks * (1.0 - loss)) < 4.0 * spread, "each link by itself"
    assert abs(sum(arrived) - len(arrived) * chunks * (1.0 - loss)) < Z * math.sqrt(len(arrived)) * spread


def lost_by_position(
    network: SimulatedNetwork, chunks: int, exchanges: int, reliability: Reliability
) -> list[torch.Tensor]:
    """For each exchange and each message, which chunks were lost."""

    def work(transport: Transport) -> list[torch.Tensor]:
        group, lost = Group(transport), []
        for _ in range(exchanges):
            tensor = torch.ones(group.size * chunks * CHUNK)
            outputs = [torch.zeros(chunks * CHUNK) for _ in range(group.size)]
            arrival = all_gather(group, outputs, tensor[: chunks * CHUNK], reliability=reliability).wait()[0]
            lost += [~arrival.mask(peer) for peer in range(group.size) if peer != group.rank]
        return lost

    return [each for lost in network.run(work) for each in lost]


@pytest.mark.thorough
def test_every_position_is_equally_likely_to_be_lost() -> None:
    network = SimulatedNetwork(3, loss=0.2, options=SMALL, seed=6)
    lost = torch.stack(lost_by_position(network, 25, 400, LOSSY)).double()
    expected = lost.mean() * lost.shape[0]
    chi_square = ((lost.sum(0) - expected) ** 2 / (expected * (1.0 - lost.mean()))).sum()
    assert 0.19 < lost.mean() < 0.21
    assert chi_square < chi_square_limit(24)


@pytest.mark.thorough
@pytest.mark.parametrize("cut_by", ["deadline", "bursts"])
def test_every_position_is_equally_likely_to_be_lost_when_losses_come_in_a_row(cut_by: str) -> None:
    chunks = 25
    if cut_by == "deadline":
        # 25 datagrams of 256 bytes take 5.1 ms at 10 Mbit/s: not all of them arrive in time.
        network = SimulatedNetwork(2, rate="10mbit", options=Options(datagram_bytes=256), seed=7)
        reliability = Reliability(budget=1.0, deadline_s=2.6e-3)
    else:
        network = SimulatedNetwork(2, loss=GilbertElliott(p=0.4, burst=12), options=SMALL, seed=7)
        reliability = LOSSY
    lost = [each for each in lost_by_position(network, chunks, 1_500, reliability) if each.any() and not each.all()]
    assert len(lost) > 600
    changes = torch.stack([(each != each.roll(1)).sum() for each in lost]).double().mean()
    assert changes < 4.0, "in a row they are: on the circle of positions the lost ones are one run or two"
    # Within an exchange positions depend on each other, so each exchange counts with one of its losses.
    generator = torch.Generator().manual_seed(7)
    picks = torch.tensor([int(torch.multinomial(each.double(), 1, generator=generator)) for each in lost])
    counts = torch.bincount(picks, minlength=chunks).double()
    expected = len(lost) / chunks
    assert ((counts - expected) ** 2 / expected).sum() < chi_square_limit(chunks - 1)


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter"])
def test_the_mean_of_what_arrived_is_unbiased_and_filling_with_zeros_is_not(collective: str) -> None:
    n, chunks, seeds = 4, 6, 250
    elements = chunks * CHUNK
    ours, zeros = [], []
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        # All ranks draw from one distribution, whose mean is not zero.
        all_inputs = 1.0 + torch.randn(n, n, elements, generator=generator)

        def work(transport: Transport, inputs: torch.Tensor = all_inputs) -> tuple[torch.Tensor, torch.Tensor]:
            group = Group(transport)
            if collective == "all_reduce":
                tensor = inputs[group.rank].clone()
                arrival = all_reduce(group, tensor, Op.AVG, reliability=LOSSY).wait()[0]
                # So few elements go directly to every rank, so every rank has counts of all of them.
                counts = by_element(arrival.counts(), n * elements).view(n, elements)
                return tensor.view(n, elements)[group.rank], counts[group.rank]
            output = torch.empty(elements)
            arrival = reduce_scatter(group, output, list(inputs[group.rank]), Op.AVG, reliability=LOSSY).wait()[0]
            return output, by_element(arrival.counts(), elements)

        truth = all_inputs.mean(0)
        for rank, (result, counts) in enumerate(SimulatedNetwork(n, loss=0.3, options=SMALL, seed=seed).run(work)):
            ours.append(float((result - truth[rank]).mean()))
            zeros.append(float((result * counts / n - truth[rank]).mean()))
    assert abs(t_of(torch.tensor(ours))) < Z
    assert abs(t_of(torch.tensor(zeros))) > 3 * Z, "the same test finds the bias of zeros"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", [Op.SUM, Op.AVG])
def test_a_lossy_all_reduce_is_the_mean_of_what_arrived_and_what_was_not_shared_stays_ones_own(
    op: Op, dtype: torch.dtype
) -> None:
    n, chunks = 4, 600  # more than is sent directly
    per_chunk = CHUNK * 4 // dtype.itemsize
    shard = chunks * per_chunk

    def given(rank: int) -> torch.Tensor:
        # Small whole numbers: their sums are exact in any order, so arrival order does not matter.
        return torch.randint(-9, 10, (n, shard), generator=torch.Generator().manual_seed(rank)).to(dtype)

    def work(transport: Transport) -> tuple[torch.Tensor, Any]:
        tensor = given(transport.rank).flatten()
        arrival = all_reduce(Group(transport), tensor, op, reliability=LOSSY).wait()[0]
        return tensor.view(n, chunks, per_chunk), arrival

    results = SimulatedNetwork(n, loss=0.3, options=SMALL, seed=8).run(work)
    lost = 0
    for rank, (tensor, arrival) in enumerate(results):
        here = {peer: arrival.mask(peer) for peer in range(n) if peer != rank}
        counts = 1 + torch.stack([mask.int() for mask in here.values()]).sum(0)
        assert torch.equal(arrival.counts(), counts), "counts are those of the masks, and one's own"
        total = given(rank)[rank].float().view(chunks, per_chunk)
        for peer, mask in here.items():
            total = total + given(peer)[rank].float().view(chunks, per_chunk) * mask.unsqueeze(1)
        divisor = counts.float().unsqueeze(1) / (1.0 if op is Op.AVG else n)
        assert same_bits(tensor[rank], (total / divisor).to(dtype))
        for peer in here:
            shared = arrival.mask(peer, stage=1)
            lost += int((~shared).sum())
            own = given(rank)[peer].view(chunks, per_chunk) * (1 if op is Op.AVG else n)
            wanted = torch.where(shared.unsqueeze(1), results[peer][0][peer], own)
            assert same_bits(tensor[peer], wanted)
    assert lost > 1_000


@pytest.mark.parametrize("op", [Op.SUM, Op.AVG])
def test_a_small_lossy_all_reduce_is_each_ranks_own_mean_of_what_it_got(op: Op) -> None:
    n, chunks = 3, 10

    def given(rank: int) -> torch.Tensor:
        return torch.full((chunks, CHUNK), float(4**rank))

    def work(transport: Transport) -> tuple[torch.Tensor, Any]:
        tensor = given(transport.rank)
        return tensor, all_reduce(Group(transport), tensor, op, reliability=LOSSY).wait()[0]

    for rank, (tensor, arrival) in enumerate(SimulatedNetwork(n, loss=0.3, options=SMALL, seed=8).run(work)):
        total, counts = given(rank), torch.ones(chunks, dtype=torch.int32)
        for peer in range(n):
            if peer != rank:
                total = total + given(peer) * arrival.mask(peer).unsqueeze(1)
                counts += arrival.mask(peer)
        assert torch.equal(arrival.counts(), counts)
        assert len(set(counts.tolist())) > 1
        assert same_bits(tensor, total * ((1.0 if op is Op.AVG else n) / counts.float().unsqueeze(1)))

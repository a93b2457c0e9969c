"""Masks of virtual workers where the links of a sender have something in common: shared loss, and stragglers.

Seeds are fixed and bounds are five standard deviations, so a failure is a fault of the code.
"""

import math

import pytest
import torch
from torch import Tensor

from mask_statistics import CPU, deviation, owners, within
from stormtorch import LOSSY, Options
from stormtorch.collectives import Group, all_gather
from stormtorch.exchange.exchange import Transport
from stormtorch.exchange.simulated import SimulatedNetwork
from stormtorch.network.loss import GilbertElliott, Shared, Stragglers
from stormtorch_lab.simulation.arrivals.masks import Masks

pytestmark = pytest.mark.pure


def common_rate(model: Shared) -> float:
    """How often two receivers lose the same chunk."""
    return model.common + (1.0 - model.common) * model.own**2


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_receivers_lose_in_common_what_is_shared(share: float) -> None:
    model, chunks = Shared(p=0.2, share=share), 20_000
    masks = Masks(model, 4, owners(0, chunks, 0, chunks), 1, CPU)
    for lost in (
        ~masks.up(),
        ~masks.down(),
        ~masks.retransmitted(torch.ones(4, 2 * chunks, dtype=torch.bool), up=False),
    ):
        for worker in (0, 2):
            assert within(float(lost[worker].double().mean()), 0.2, math.sqrt(0.16 / (2 * chunks)))
    down, up = ~masks.down(), ~masks.up()
    repair = masks.retransmitted(down, up=False)
    for first, second, sender in ((0, 2, 1), (0, 3, 1), (0, 2, 3), (1, 2, 3)):
        part = slice(0, chunks) if sender == 1 else slice(chunks, 2 * chunks)
        both = (down[first] & down[second])[part].double()
        rate = common_rate(model)
        assert within(float(both.mean()), rate, math.sqrt(rate * (1.0 - rate) / chunks)), "copies of one chunk"
    # Different senders, different chunks and repairs have nothing in common.
    for apart in (up[0] & up[2], down[0, :chunks] & down[2, chunks:], down[0, 1:chunks] & down[2, : chunks - 1]):
        assert within(float(apart.double().mean()), 0.04, math.sqrt(0.04 * 0.96 / apart.numel()))
    retransmitted = (down[0] & down[2])[:chunks]
    fail = (~repair[0] & ~repair[2])[:chunks][retransmitted].double()
    if fail.numel():
        assert within(float(fail.mean()), 0.04, math.sqrt(0.04 * 0.96 / fail.numel()))


def test_shared_bursts_go_on_and_are_those_of_the_sender() -> None:
    model = Shared(p=0.2, share=1.0, burst=6)
    masks = Masks(model, 20, torch.arange(20), 1, CPU)
    lost = []
    for _ in range(1_500):
        down = ~masks.down()
        lost.append(torch.where(torch.arange(20) == 0, down[1], down[0]))
        others = torch.where(torch.arange(20) == 2, down[3], down[2])
        others[0], lost[-1][2] = lost[-1][0], others[2]
        assert torch.equal(others, lost[-1]), "all receivers alike"
    flat = torch.stack(lost)
    before, after = flat[:-1].flatten(), flat[1:].flatten()
    chain = GilbertElliott(p=0.2, burst=6)
    assert within(float(flat.double().mean()), 0.2, deviation(chain, flat.numel()))
    stays = after[before].double()
    assert within(float(stays.mean()), 5 / 6, math.sqrt(5 / 36 / stays.numel()))
    up = torch.cat([(~Masks(model, 2, owners(0, 20_000), seed, CPU).up())[0] for seed in range(5)])
    assert within(float(up.double().mean()), 0.2, deviation(chain, up.numel()))
    bursts = int((up & ~up.roll(1)).sum())
    assert within(float(up.sum()) / bursts, 6.0, math.sqrt(30.0 / bursts) + 50 / bursts)


@pytest.mark.parametrize("model", [Shared(p=0.2, share=1.0, burst=50), GilbertElliott(p=0.2, burst=50)])
def test_bursts_stay_with_sender_and_link_when_shards_change_owners(model: Shared | GilbertElliott) -> None:
    masks = Masks(model, 12, torch.arange(12), 1, CPU)
    generator = torch.Generator().manual_seed(1)
    last, stays = torch.zeros(12, 12, dtype=torch.bool), []
    for _ in range(600):
        owner = torch.randperm(12, generator=generator)
        lost = torch.zeros(12, 12, dtype=torch.bool)
        lost[:, owner] = ~masks.down(owner)  # by receiver and sender
        stays.append(lost[last & ~torch.eye(12, dtype=torch.bool)])
        last = lost
    stayed = torch.cat(stays).double()
    # All eleven receivers of a sender may be one and the same sample.
    assert within(float(stayed.mean()), 0.98, math.sqrt(0.98 * 0.02 / stayed.numel() * 11))


def test_the_simulated_network_shares_loss_as_masks_do() -> None:
    n, chunks = 4, 3_000
    options = Options(datagram_bytes=256, silence_s=5.0)
    elements = chunks * SimulatedNetwork(2, options=options).chunk_bytes // 4
    model = Shared(p=0.2, share=0.5)

    def work(transport: Transport) -> list[Tensor]:
        outputs = [torch.zeros(elements) for _ in range(n)]
        arrival = all_gather(Group(transport), outputs, torch.ones(elements), reliability=LOSSY).wait()[0]
        return [torch.zeros(chunks).bool() if peer == transport.rank else ~arrival.mask(peer) for peer in range(n)]

    engine = torch.stack(
        [torch.stack(rank) for rank in SimulatedNetwork(n, loss=model, options=options, seed=2).run(work)]
    )
    ours = torch.stack([(~row).view(n, chunks) for row in Masks(model, n, owners(*[chunks] * n), 2, CPU).down()])
    rate = common_rate(model)
    for lost in (engine, ours):
        for source in range(n):
            first, second, third = (lost[target, source] for target in range(n) if target != source)
            assert within(float(first.double().mean()), 0.2, math.sqrt(0.16 / chunks))
            for other in (second, third):
                both = float((first & other).double().mean())
                assert within(both, rate, math.sqrt(rate * (1.0 - rate) / chunks))


@pytest.mark.parametrize("key", [None, bytes(range(16))], ids=["plain", "sealed"])
def test_what_is_lost_for_all_is_repaired_for_each(key: bytes | None) -> None:
    options = Options(datagram_bytes=256, silence_s=5.0, key=key)
    network = SimulatedNetwork(3, loss=Shared(p=0.4, share=1.0), options=options, seed=3)

    def work(transport: Transport) -> list[bool]:
        group, mine = Group(transport), torch.full((20_000,), float(transport.rank))
        lossy, exact = ([torch.full((20_000,), -1.0) for _ in range(3)] for _ in range(2))
        arrival = all_gather(group, lossy, mine, reliability=LOSSY).wait()[0]
        all_gather(group, exact, mine).wait()
        assert all(bool((each == rank).all()) for rank, each in enumerate(exact))
        source = 0 if transport.rank else 1
        return [bool(each) for each in arrival.mask(source)]

    _, one, two = network.run(work)
    assert one == two, "both lose the same of rank 0"
    assert 0.5 < sum(one) / len(one) < 0.7


@pytest.mark.thorough
@pytest.mark.parametrize("delivered", [0.25, 0.8, None])
def test_only_the_first_part_of_what_a_late_worker_sends_is_in_time(delivered: float | None) -> None:
    chunks, workers, exchanges = 40, 10, 400
    own = owners(*[chunks] * workers)
    masks = Masks(Stragglers(chance=0.2, delivered=delivered), workers, own, 1, CPU)
    late, kept, begins = 0, [], []
    for _ in range(exchanges):
        up = masks.up().view(workers, workers, chunks)  # by sender and owner
        down = masks.down().view(workers, workers, chunks).transpose(0, 1)
        for sent in (up, down):
            for sender in range(workers):
                messages = sent[sender, torch.arange(workers) != sender]
                assert (messages == messages[0]).all(), "each of its messages, in the same order"
                if messages.all():
                    continue
                late += 1
                kept.append(int(messages[0].sum()))
                cuts = (messages[0] & ~messages[0].roll(1)).nonzero().flatten().tolist()
                assert len(cuts) == (1 if kept[-1] else 0), "one row of chunks"
                begins += cuts
    missed = 0.0 if delivered is not None else 0.5 / chunks  # what is drawn as nearly all is all, after rounding
    chance, count = 0.2 * (1.0 - missed), 2 * exchanges * workers
    assert within(late / count, chance, math.sqrt(chance * (1.0 - chance) / count))
    part = torch.tensor(kept).double() / chunks
    if delivered is None:
        assert within(float(part.mean()), 0.5 * (1.0 - 1.0 / chunks), math.sqrt(1 / 12 / late))
    else:
        assert part.min() >= delivered - 1 / chunks and part.max() <= delivered + 1 / chunks
        assert float(part.mean()) == pytest.approx(delivered, abs=1e-9), "10 and 32 of 40 are whole numbers"
    counts = torch.bincount(torch.tensor(begins), minlength=chunks).double()
    assert (counts > 0).all(), "from anywhere on"


def test_workers_are_late_each_by_itself() -> None:
    workers, exchanges = 20, 500
    masks = Masks(Stragglers(chance=0.3, delivered=0.5), workers, owners(*[2] * workers), 1, CPU)
    for up in (True, False):
        late = []
        for _ in range(exchanges):
            lost = ~(masks.up() if up else masks.down()).view(workers, workers, 2)  # by worker and owner
            late.append(lost.any(2).any(1 if up else 0))
        by_exchange = torch.stack(late).double().sum(1)
        assert within(float(by_exchange.mean()), 6.0, math.sqrt(4.2 / exchanges))
        # A binomial's variance; that of a sample varies by the root of two over its size.
        assert within(float(by_exchange.var()), 4.2, 4.2 * math.sqrt(2.0 / exchanges))


def test_a_late_worker_delivers_its_part_of_short_messages_on_average_and_all_of_a_repair() -> None:
    masks = Masks(Stragglers(chance=1.0, delivered=0.3), 30, torch.arange(30), 1, CPU)
    arrived = torch.stack([masks.up() for _ in range(200)])[:, :, 0][:, 1:].double()
    assert within(float(arrived.mean()), 0.3, math.sqrt(0.21 / arrived.numel()))
    missing = ~masks.down()
    assert torch.equal(masks.retransmitted(missing, up=False), missing)

"""Masks of virtual workers: every link loses as its model says, as on the simulated network of the engine.

Seeds are fixed and bounds are five standard deviations, so a failure is a fault of the code.
"""

import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from stormtorch import LOSSY, Options
from stormtorch.collectives import Group, all_gather
from stormtorch.loss import Bernoulli, GilbertElliott, LossModel, PerLink, Shared, Stragglers, Trace
from stormtorch.sim import SimNetwork
from stormtorch.simulation import masks as masks_module
from stormtorch.simulation.masks import Masks
from stormtorch.transport import Transport

pytestmark = pytest.mark.pure

CPU = torch.device("cpu")
BURSTS = [GilbertElliott(p=0.1, burst=8), GilbertElliott(p=0.3, burst=2), GilbertElliott(p=0.6, burst=1.6)]
"""The last one changes its state more often than chance would."""
TRACE = "10011000001"
"""No two of its rotations are equal."""


def owners(*sizes: int) -> Tensor:
    """Worker i owns sizes[i] chunks."""
    return torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))


def within(value: float, expected: float, deviation: float) -> bool:
    return abs(value - expected) <= 5.0 * deviation


def memory(model: GilbertElliott) -> float:
    return 1.0 - model.p / ((1.0 - model.p) * model.burst) - 1.0 / model.burst


def deviation(model: GilbertElliott | Bernoulli, count: int) -> float:
    """Of the rate of `count` datagrams of one link."""
    kept = memory(model) if isinstance(model, GilbertElliott) else 0.0
    return math.sqrt(model.p * (1.0 - model.p) / count * (1.0 + kept) / (1.0 - kept))


def one_link(network: LossModel, chunks: int, exchanges: int, seed: int = 1) -> list[Tensor]:
    """What link (0, 1) loses of each exchange."""
    masks = Masks(network, 2, owners(0, chunks), seed, CPU)
    return [~masks.up()[0] for _ in range(exchanges)]


def in_sequence(network: LossModel, workers: int, exchanges: int, seed: int = 1) -> Tensor:
    """(time, source, target) of links that carry one chunk up and one down in each exchange: no order to be rotated."""
    masks = Masks(network, workers, torch.arange(workers), seed, CPU)
    lost = []
    for _ in range(exchanges):
        lost += [~masks.up(), ~masks.down().t()]
    return torch.stack(lost)


def off_diagonal(lost: Tensor) -> Tensor:
    return lost[:, ~torch.eye(lost.shape[1], dtype=torch.bool)]


def test_each_link_loses_at_its_own_rate_in_both_directions() -> None:
    rates = [[0.0, 0.01, 0.1, 1.0], [0.4, 0.0, 0.0, 0.2], [0.05, 0.7, 0.0, 0.3], [0.9, 0.02, 0.5, 0.0]]
    sizes, exchanges = [700, 300, 0, 1000], 20
    masks = Masks(PerLink.matrix(rates), 4, owners(*sizes), 3, CPU)
    for up in (True, False):
        lost = sum((~(masks.up() if up else masks.down())).double() for _ in range(exchanges))
        assert isinstance(lost, Tensor)
        for worker in range(4):
            for owner, part in enumerate(torch.split(lost[worker], sizes)):
                p = rates[worker][owner] if up else rates[owner][worker]
                count = part.numel() * exchanges
                if worker == owner or count == 0:
                    assert part.sum() == 0
                else:
                    assert within(float(part.sum()) / count, p, math.sqrt(p * (1.0 - p) / count)), (up, worker, owner)


@pytest.mark.parametrize("p", [0.0, 0.001, 0.1, 0.4, 1.0])
def test_independent_loss_has_its_rate_and_no_memory(p: float) -> None:
    lost = torch.cat([~Masks(Bernoulli(p=p), 8, owners(0, 0, 2500, 0, 2500), 5, CPU).up()[row] for row in (0, 1, 7)])
    lost = torch.cat([lost, *one_link(Bernoulli(p=p), 20_000, 3)])
    assert within(float(lost.double().mean()), p, math.sqrt(p * (1.0 - p) / lost.numel()))
    both = (lost[0::2] & lost[1::2]).double()
    assert within(float(both.mean()), p * p, math.sqrt(p * p * (1.0 - p * p) / both.numel()))


@pytest.mark.parametrize("p", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["all", "links"])
def test_what_a_worker_sends_to_itself_arrives(p: float, kind: str) -> None:
    model = Bernoulli(p=p)
    network = model if kind == "all" else PerLink(default=model, links={(1, 0): GilbertElliott(p=0.2, burst=3)})
    own = owners(3, 0, 4)
    masks = Masks(network, 3, own, 1, CPU)
    mine = torch.arange(3)[:, None] == own
    for arrived in (masks.up(), masks.down(), masks.again(torch.ones(3, 7, dtype=torch.bool), up=True)):
        assert arrived.dtype == torch.bool
        assert arrived[mine].all()
        others = arrived[2, own == 0]
        assert others.all() if p == 0.0 else not others.any()


@pytest.mark.parametrize("model", BURSTS)
def test_bursts_have_their_rate_and_their_mean_length(model: GilbertElliott) -> None:
    exchanges = one_link(model, 20_000, 8)
    lost = torch.cat(exchanges).double()
    assert within(float(lost.mean()), model.p, deviation(model, lost.numel()))
    # On the circle of chunks; where an exchange begins and ends, at most one run of each is cut.
    bursts = sum(int((each & ~each.roll(1)).sum()) for each in exchanges)
    spread = math.sqrt(model.burst * (model.burst - 1.0) / bursts) + len(exchanges) * model.burst / bursts
    assert within(float(lost.sum()) / bursts, model.burst, spread)


@pytest.mark.parametrize("model", BURSTS)
@pytest.mark.parametrize("kind", ["all", "mixed"])
def test_a_burst_goes_on_from_exchange_to_exchange_and_from_up_to_down(model: GilbertElliott, kind: str) -> None:
    network: LossModel = model
    if kind == "mixed":
        network = PerLink(default=model, links={(0, 1): Bernoulli(p=0.5), (2, 3): Trace(bits=TRACE)})
    lost = in_sequence(network, 12, 400)
    if kind == "mixed":
        drawn = lost[:, 0, 1]
        assert within(float(drawn.double().mean()), 0.5, 0.5 / math.sqrt(drawn.numel()))
        lost = lost[:, 4:]
        lost = lost[:, :, :4]
        flat = lost.flatten(1)
    else:
        flat = off_diagonal(lost)
    before, after = flat[:-1].flatten(), flat[1:].flatten()
    assert within(float(flat.double().mean()), model.p, deviation(model, flat.numel()))
    for state, chance in ((True, 1.0 - 1.0 / model.burst), (False, model.p / (1.0 - model.p) / model.burst)):
        chosen = after[before == state].double()
        assert within(float(chosen.mean()), chance, math.sqrt(chance * (1.0 - chance) / chosen.numel()))
    first = torch.cat([off_diagonal(in_sequence(model, 40, 1, seed))[0] for seed in range(10)]).double()
    assert within(float(first.mean()), model.p, deviation(Bernoulli(p=model.p), first.numel())), "from the first one on"


def test_bursts_of_different_links_are_independent() -> None:
    model = GilbertElliott(p=0.2, burst=8)
    flat = off_diagonal(in_sequence(model, 16, 1_000))
    for shift in (1, 15, 16, 100):
        both = (flat & flat.roll(shift, 1)).double()
        # Five times the deviation of chains whose pairs remember as long as each of them.
        kept = memory(model)
        spread = math.sqrt(0.04 * 0.96 / both.numel() * (1.0 + kept) / (1.0 - kept))
        assert within(float(both.mean()), 0.04, spread)


def test_a_message_is_sent_from_another_chunk_on_in_each_exchange() -> None:
    chunks = 25
    lost = [each for each in one_link(GilbertElliott(p=0.4, burst=12), chunks, 4_000) if each.any() and not each.all()]
    assert len(lost) > 1_500
    changes = torch.stack([(each != each.roll(1)).sum() for each in lost]).double().mean()
    assert changes < 4.0, "in a row they are: on the circle of chunks the lost ones are one run or two"
    generator = torch.Generator().manual_seed(7)
    picks = torch.tensor([int(torch.multinomial(each.double(), 1, generator=generator)) for each in lost])
    cut = torch.cat([(each != each.roll(1)).nonzero().flatten() for each in lost])
    for where in (picks, cut):
        counts = torch.bincount(where, minlength=chunks).double()
        expected = where.numel() / chunks
        assert ((counts - expected) ** 2 / expected).sum() < 62.0, (
            "99.9 % of chi-square at 24 is 51; cuts come in pairs"
        )


def test_a_trace_is_replayed_in_a_loop_from_a_place_of_each_link() -> None:
    lost = off_diagonal(in_sequence(Trace(bits=TRACE), 12, 30))
    begins = []
    for link in lost.t().tolist():
        fits = [at for at in range(11) if link == [TRACE[(at + i) % 11] == "1" for i in range(60)]]
        assert len(fits) == 1
        begins += fits
    assert set(begins) == set(range(11))


def test_a_trace_goes_on_in_the_rotated_order_and_by_as_much_as_is_sent() -> None:
    chunks, seen = 7, set()
    masks = Masks(Trace(bits=TRACE), 2, owners(0, chunks), 4, CPU)
    places = set(range(11))
    for round_ in range(200):
        repair = round_ % 3 == 2
        sent = torch.arange(chunks) % 3 != round_ % 4 if repair else torch.ones(chunks, dtype=torch.bool)
        mask = torch.stack([sent, torch.zeros(chunks, dtype=torch.bool)])
        arrived = (masks.again(mask, up=True) if repair else masks.up())[0]
        reached = set()
        for at in places:
            for turn in range(chunks):
                order = [(turn + k) % chunks for k in range(chunks)]
                order = [chunk for chunk in order if sent[chunk]]
                if all(bool(arrived[chunk]) == (TRACE[(at + k) % 11] == "0") for k, chunk in enumerate(order)):
                    reached.add((at + len(order)) % 11)
                    seen.add(turn)
        assert reached, "some rotation explains it"
        places = reached
    assert len(places) == 1
    assert seen == set(range(chunks))


def test_repair_is_a_fresh_draw_for_what_is_missing_alone() -> None:
    masks = Masks(Bernoulli(p=0.4), 6, owners(*[500] * 6), 2, CPU)
    missing = ~masks.down()
    repaired = masks.again(missing, up=False)
    assert not (repaired & ~missing).any()
    count = int(missing.sum())
    assert within(float(repaired.sum()) / count, 0.6, math.sqrt(0.24 / count))


def test_a_burst_lasts_for_what_is_sent_again_and_no_longer() -> None:
    model = GilbertElliott(p=0.2, burst=50)
    masks = Masks(model, 30, torch.arange(30), 6, CPU)
    nothing = torch.zeros(30, 30, dtype=torch.bool)
    last, stays = ~masks.up(), []
    for round_ in range(200):
        for _ in range(3):
            assert not masks.again(nothing, up=round_ % 2 == 0).any()
        lost = ~masks.up()
        stays.append(lost[last])
        last = lost
    stayed = torch.cat(stays).double()
    assert within(float(stayed.mean()), 0.98, math.sqrt(0.98 * 0.02 / stayed.numel()))


def test_shards_may_have_other_owners_in_an_exchange() -> None:
    dead = PerLink(links={(0, 1): Bernoulli(p=1.0)})
    for links in (dead, PerLink(links={**dead.links, (2, 2): GilbertElliott(p=0.1, burst=2), (3, 2): Trace(bits="0")})):
        masks = Masks(links, 4, owners(2, 3, 0, 1), 1, CPU)
        swapped = torch.tensor([1, 1, 3, 3, 3, 0])
        assert masks.up().logical_not().nonzero().tolist() == [[0, 2], [0, 3], [0, 4]]
        assert masks.up(swapped).logical_not().nonzero().tolist() == [[0, 0], [0, 1]]
        assert masks.down(swapped).logical_not().nonzero().tolist() == [[1, 5]]
        everything = torch.ones(4, 6, dtype=torch.bool)
        assert (~masks.again(everything, up=False, owner_C=swapped)).nonzero().tolist() == [[1, 5]]
        assert masks.down().logical_not().nonzero().tolist() == [[1, 0], [1, 1]]


NETWORKS: list[LossModel] = [
    Bernoulli(p=0.3),
    GilbertElliott(p=0.3, burst=4),
    Trace(bits=TRACE),
    PerLink(default=Bernoulli(p=0.1), links={(0, 1): GilbertElliott(p=0.6, burst=1.6), (1, 0): Trace(bits=TRACE)}),
    Shared(p=0.3, share=0.1, burst=2),
    Stragglers(chance=0.5, delivered=0.8, network=Bernoulli(p=2 / 9)),
]


def some(masks: Masks) -> list[Tensor]:
    first = [masks.up(), masks.down()]
    return [*first, masks.again(~first[1], up=False), masks.up()]


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: type(network).__name__)
def test_masks_depend_on_the_seed_alone_and_go_on_after_a_resume(network: LossModel) -> None:
    def made(seed: int) -> Masks:
        return Masks(network, 5, owners(40, 0, 30, 20, 10), seed, CPU)

    masks = made(1)
    begun = some(masks)
    torch.manual_seed(0)
    assert all(torch.equal(a, b) for a, b in zip(begun, some(made(1)), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(begun, some(made(2)), strict=True))
    stored = io.BytesIO()
    torch.save(masks.state_dict(), stored)
    expected = some(masks)
    stored.seek(0)
    other = made(3)
    other.load_state_dict(torch.load(stored))
    assert all(torch.equal(a, b) for a, b in zip(expected, some(other), strict=True))
    with pytest.raises(ValueError, match="another network"):
        Masks(NETWORKS[0], 4, owners(1, 1, 1, 1), 1, CPU).load_state_dict(masks.state_dict())


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: type(network).__name__)
def test_workers_may_be_drawn_in_blocks(network: LossModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks_module, "_BLOCK_CPU", 3 * 600)
    masks = Masks(network, 7, owners(*[100] * 5, 0, 100), 1, CPU)
    rate = torch.stack([(~masks.down()).double().mean(1) for _ in range(20)]).mean(0)
    full = [0.3, 0.3, 4 / 11, 0.1, 0.3, 0.3][NETWORKS.index(network)]
    for worker in range(2, 7):
        expected = full * (1.0 if worker == 5 else 5 / 6)
        assert within(float(rate[worker]), expected, math.sqrt(4.0 * full / 12_000)), worker


@pytest.mark.parametrize("model", [Bernoulli(p=0.2), GilbertElliott(p=0.2, burst=6), Trace(bits=TRACE)])
def test_masks_lose_as_the_simulated_network_does(model: Bernoulli | GilbertElliott | Trace) -> None:
    n, chunks, exchanges = 3, 400, 12
    options = Options(datagram_bytes=256, silence_s=5.0)
    elements = chunks * SimNetwork(2, options=options).chunk_bytes // 4

    def work(transport: Transport) -> list[Tensor]:
        lost = []
        for _ in range(exchanges):
            outputs = [torch.zeros(elements) for _ in range(n)]
            arrival = all_gather(Group(transport), outputs, torch.ones(elements), reliability=LOSSY).wait()[0]
            lost += [~arrival.mask(peer) for peer in range(n) if peer != transport.rank]
        return lost

    engine = torch.stack(
        [each for rank in SimNetwork(n, loss=model, options=options, seed=2).run(work) for each in rank]
    )
    masks = Masks(model, n, owners(*[chunks] * n), 2, CPU)
    rows = []
    for _ in range(exchanges):
        for worker, arrived in enumerate(masks.down()):
            rows += [~part for peer, part in enumerate(arrived.split(chunks)) if peer != worker]
    ours = torch.stack(rows)
    assert ours.shape == engine.shape
    count = ours.numel()
    p = 4 / 11 if isinstance(model, Trace) else model.p
    spread = math.sqrt(2.0) * (deviation(model, count) if not isinstance(model, Trace) else math.sqrt(p / count))
    assert within(float(ours.double().mean()), float(engine.double().mean()), spread)
    # Runs of each length, on the circle of chunks, as parts of all runs.
    lengths = [_run_lengths(each) for each in (ours, engine)]
    for length in range(1, 9):
        a, b = (float((each == length).double().mean()) for each in lengths)
        common = (a + b) / 2.0
        runs = min(each.numel() for each in lengths)
        assert within(a, b, math.sqrt(2.0 * common * (1.0 - common) / runs) + 1.0 / chunks), length


def _run_lengths(lost: Tensor) -> Tensor:
    found = []
    for each in lost:
        if each.all() or not each.any():
            continue
        turned = each.roll(-int((~each).nonzero()[0]))
        values, counts = turned.unique_consecutive(return_counts=True)
        found.append(counts[values])
    return torch.cat(found)


def common_rate(model: Shared) -> float:
    """How often two receivers lose the same chunk."""
    return model.common + (1.0 - model.common) * model.own**2


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_receivers_lose_in_common_what_is_shared(share: float) -> None:
    model, chunks = Shared(p=0.2, share=share), 20_000
    masks = Masks(model, 4, owners(0, chunks, 0, chunks), 1, CPU)
    for lost in (~masks.up(), ~masks.down(), ~masks.again(torch.ones(4, 2 * chunks, dtype=torch.bool), up=False)):
        for worker in (0, 2):
            assert within(float(lost[worker].double().mean()), 0.2, math.sqrt(0.16 / (2 * chunks)))
    down, up = ~masks.down(), ~masks.up()
    repair = masks.again(down, up=False)
    for first, second, sender in ((0, 2, 1), (0, 3, 1), (0, 2, 3), (1, 2, 3)):
        part = slice(0, chunks) if sender == 1 else slice(chunks, 2 * chunks)
        both = (down[first] & down[second])[part].double()
        rate = common_rate(model)
        assert within(float(both.mean()), rate, math.sqrt(rate * (1.0 - rate) / chunks)), "copies of one chunk"
    # Different senders, different chunks and repairs have nothing in common.
    for apart in (up[0] & up[2], down[0, :chunks] & down[2, chunks:], down[0, 1:chunks] & down[2, : chunks - 1]):
        assert within(float(apart.double().mean()), 0.04, math.sqrt(0.04 * 0.96 / apart.numel()))
    again = (down[0] & down[2])[:chunks]
    fail = (~repair[0] & ~repair[2])[:chunks][again].double()
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
    elements = chunks * SimNetwork(2, options=options).chunk_bytes // 4
    model = Shared(p=0.2, share=0.5)

    def work(transport: Transport) -> list[Tensor]:
        outputs = [torch.zeros(elements) for _ in range(n)]
        arrival = all_gather(Group(transport), outputs, torch.ones(elements), reliability=LOSSY).wait()[0]
        return [torch.zeros(chunks).bool() if peer == transport.rank else ~arrival.mask(peer) for peer in range(n)]

    engine = torch.stack([torch.stack(rank) for rank in SimNetwork(n, loss=model, options=options, seed=2).run(work)])
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
    network = SimNetwork(3, loss=Shared(p=0.4, share=1.0), options=options, seed=3)

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
    assert torch.equal(masks.again(missing, up=False), missing)


def test_wrong_arguments_are_refused_by_name() -> None:
    good: dict[str, Any] = {"network": Bernoulli(p=0), "workers": 3, "owner_C": owners(1, 1, 2), "seed": 1}
    for name, value in (
        ("workers", 0),
        ("workers", 2),
        ("owner_C", torch.tensor([0, 2, 1])),
        ("owner_C", torch.tensor([0, 1, 3])),
        ("owner_C", torch.tensor([0.0])),
        ("owner_C", torch.zeros(0, dtype=torch.int64)),
        ("network", PerLink(links={(0, 3): Bernoulli(p=0)})),
    ):
        with pytest.raises(ValueError, match=r"workers|owner_C|network"):
            Masks(**{**good, name: value})
    masks = Masks(**good)
    for owner_C in (owners(1, 2, 1), torch.tensor([0, 1, 1, 1]), owners(1, 1, 1)):
        with pytest.raises(ValueError, match="owner_C"):
            masks.up(owner_C)
    with pytest.raises(ValueError, match="missing_WC"):
        masks.again(torch.ones(3, 4), up=True)

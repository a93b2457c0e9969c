"""Masks of virtual workers: every link loses as its model says, as on the simulated network of the engine.

Seeds are fixed and bounds are five standard deviations, so a failure is a fault of the code.
"""

import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mask_statistics import CPU, deviation, memory, owners, within
from stormtorch import LOSSY, Options
from stormtorch.collectives import Group, all_gather
from stormtorch.exchange.exchange import Transport
from stormtorch.exchange.simulated import SimulatedNetwork
from stormtorch.network.loss import Bernoulli, GilbertElliott, LossModel, PerLink, Shared, Stragglers, Trace
from stormtorch_lab.simulation.arrivals import masks as masks_module
from stormtorch_lab.simulation.arrivals.masks import Masks

pytestmark = pytest.mark.pure

BURSTS = [GilbertElliott(p=0.1, burst=8), GilbertElliott(p=0.3, burst=2), GilbertElliott(p=0.6, burst=1.6)]
"""The last one changes its state more often than chance would."""
TRACE = "10011000001"
"""No two of its rotations are equal."""


def one_link(network: LossModel, chunks: int, exchanges: int, seed: int = 1) -> list[Tensor]:
    """Losses of link (0, 1) in each exchange."""
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
    for arrived in (masks.up(), masks.down(), masks.retransmitted(torch.ones(3, 7, dtype=torch.bool), up=True)):
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


@pytest.mark.thorough
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


@pytest.mark.thorough
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
        arrived = (masks.retransmitted(mask, up=True) if repair else masks.up())[0]
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
    repaired = masks.retransmitted(missing, up=False)
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
            assert not masks.retransmitted(nothing, up=round_ % 2 == 0).any()
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
        assert (~masks.retransmitted(everything, up=False, owner_C=swapped)).nonzero().tolist() == [[1, 5]]
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
    return [*first, masks.retransmitted(~first[1], up=False), masks.up()]


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
    elements = chunks * SimulatedNetwork(2, options=options).chunk_bytes // 4

    def work(transport: Transport) -> list[Tensor]:
        lost = []
        for _ in range(exchanges):
            outputs = [torch.zeros(elements) for _ in range(n)]
            arrival = all_gather(Group(transport), outputs, torch.ones(elements), reliability=LOSSY).wait()[0]
            lost += [~arrival.mask(peer) for peer in range(n) if peer != transport.rank]
        return lost

    engine = torch.stack(
        [each for rank in SimulatedNetwork(n, loss=model, options=options, seed=2).run(work) for each in rank]
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
    for owner_C in (owners(1, 2, 1), torch.tensor([0, 1, 1, 1]), owners(1, 1, 1), owners(1)):
        with pytest.raises(ValueError, match="owner_C"):
            masks.up(owner_C)
    with pytest.raises(ValueError, match="missing_WC"):
        masks.retransmitted(torch.ones(3, 4), up=True)

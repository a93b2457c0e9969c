"""Policies that communicate rarely (local SGD), on a simulated network, compared with a single-process reference."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from stormtorch import EXACT, LOSSY, ModelAveraging, Policy, RankPolicy
from stormtorch.collectives.base.spans import shards
from stormtorch.collectives.formats.sparse import Sparse
from stormtorch.policies import DiLoCo, Gossip, SparseDiLoCo, StreamingDiLoCo
from stormtorch_lab import LightDp
from stormtorch_lab.policies import AREA, MIFA
from training import Rank, on_ranks, perceptron, regression, sgd, vectors
from views import Member, with_members

pytestmark = pytest.mark.pure


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in model.parameters()]).clone()


def put(model: nn.Module, values: torch.Tensor) -> None:
    first = 0
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(values[first : first + each.numel()].view_as(each))
            first += each.numel()


class Apart:
    """Models that train separately in one process."""

    def __init__(self, world: int, make: Callable[[], nn.Module] = perceptron) -> None:
        self.models = [copy.deepcopy(make()) for _ in range(world)]
        self.optimizers = [sgd(model) for model in self.models]

    def step(self, rank: int, number: int) -> None:
        regression(self.models[rank], vectors(rank, number)).backward()  # type: ignore[no-untyped-call]
        self.optimizers[rank].step()
        self.optimizers[rank].zero_grad()


class Outer:
    """DiLoCo's outer optimizer, as torch's own."""

    def __init__(self, policy: DiLoCo, make: Callable[[], nn.Module] = perceptron) -> None:
        self.anchor = nn.Parameter(flat(make()))
        self.optimizer = torch.optim.SGD(
            [self.anchor], lr=policy.outer_lr, momentum=policy.momentum, nesterov=policy.momentum > 0.0
        )

    def step(self, mean: torch.Tensor) -> torch.Tensor:
        self.anchor.grad = self.anchor.detach() - mean
        self.optimizer.step()
        return self.anchor.detach().clone()

    def speed(self) -> torch.Tensor:
        found = self.optimizer.state[self.anchor].get("momentum_buffer")
        return torch.zeros_like(self.anchor) if found is None else found.clone()

    def take_back(self, where: slice, anchor: torch.Tensor, speed: torch.Tensor) -> None:
        with torch.no_grad():
            self.anchor[where] = anchor[where]
            self.optimizer.state[self.anchor]["momentum_buffer"][where] = speed[where]


def by_torch(policy: DiLoCo, steps: int, world: int) -> torch.Tensor:
    apart, outer, rounds = Apart(world), Outer(policy), 0
    for step in range(steps):
        for rank in range(world):
            apart.step(rank, step)
        if step + 1 == policy.begins_at(rounds):
            rounds += 1
            anchor = outer.step(torch.stack([flat(model) for model in apart.models]).mean(0))
            for model in apart.models:
                put(model, anchor)
    return torch.stack([flat(model) for model in apart.models]).mean(0)


def on_real(policy: Policy, steps: int, world: int = 4, **network: Any) -> list[torch.Tensor]:
    def work(rank: Rank) -> torch.Tensor:
        rank.train(steps)
        rank.optimizer.session.wait()
        return flat(rank.model)

    return on_ranks(perceptron(), sgd, work, policy=policy, world=world, **network)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "policy",
    [
        DiLoCo(every=3, reliability=EXACT),
        DiLoCo(every=2, outer_lr=1.0, momentum=0.0, reliability=EXACT, bucket_mb=5e-4),
        DiLoCo(every=4, together_until=3, outer_lr=1.0, momentum=0.5, reliability=EXACT),
    ],
    ids=["published", "local SGD", "post-local"],
)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_without_loss_it_is_an_outer_optimizer_of_torch_on_the_mean(policy: DiLoCo, world: int) -> None:
    expected = by_torch(policy, 13, world)
    found = on_real(policy, 13, world)
    torch.testing.assert_close(torch.stack(found).mean(0), expected, rtol=1e-5, atol=1e-6)


def test_at_every_step_without_an_outer_optimizer_it_is_model_averaging() -> None:
    plain = on_real(ModelAveraging(reliability=EXACT), 6)
    found = on_real(DiLoCo(every=1, outer_lr=1.0, momentum=0.0, reliability=EXACT), 6)
    for ours, theirs in zip(found, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def linear() -> nn.Linear:
    """A model of one parameter, so that its shards are easily found."""
    torch.manual_seed(3)
    return nn.Linear(8, 6, bias=False)


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_anchors_and_momentum_outlive_their_owner(victim: int) -> None:
    policy = DiLoCo(every=2, outer_lr=0.7, momentum=0.9, reliability=EXACT)

    def work(member: Member) -> torch.Tensor | None:
        if member.rank == victim:
            member.train(6)
            member.die()
            return None
        member.train(14)
        member.session.wait()
        return flat(member.model)

    apart, outer = Apart(4, linear), Outer(policy, linear)
    first, count = shards(48, 4, 4)[victim]
    orphaned = slice(first, first + count)
    for step in range(14):
        living = [rank for rank in range(4) if rank != victim or step < 6]
        for rank in living:
            apart.step(rank, step)
        if (step + 1) % 2 == 0:
            anchor, speed = outer.anchor.detach().clone(), outer.speed()
            new = outer.step(torch.stack([flat(apart.models[rank]) for rank in living]).mean(0))
            own = [flat(model)[orphaned] for model in apart.models]
            if step + 1 == 8:  # the silent owner is detected: its shard makes no outer step; ranks keep their own
                outer.take_back(orphaned, anchor, speed)
            for rank in living:
                put(apart.models[rank], new)
                if step + 1 == 8:
                    values = flat(apart.models[rank])
                    values[orphaned] = own[rank]
                    put(apart.models[rank], values)
    found = with_members(work, world=4, make=sgd, model=linear(), policy=policy)
    living = [rank for rank in range(4) if rank != victim]
    for rank in living:
        torch.testing.assert_close(found[rank], flat(apart.models[rank]), rtol=1e-4, atol=1e-5)


def test_fragments_take_turns_and_all_of_them_are_exchanged() -> None:
    policy = StreamingDiLoCo(
        every=4, fragments=2, delay=0, alpha=0.0, outer_lr=1.0, momentum=0.0, reliability=EXACT, bucket_mb=5e-4
    )
    found = on_real(policy, 4)
    # After steps 2 and 4 one half each: after step 4, only that half is the same on all ranks.
    same = (torch.stack(found) - found[0]).abs().amax(0) < 1e-6
    assert 0.2 < float(same.float().mean()) < 0.8
    later = on_real(policy, 6)
    same_later = (torch.stack(later) - later[0]).abs().amax(0) < 1e-6
    assert not bool((same & same_later).any())
    assert bool((same | same_later).all())


def test_a_result_that_is_used_later_is_mixed_with_what_was_learned_meanwhile() -> None:
    policy = StreamingDiLoCo(every=4, fragments=1, delay=2, outer_lr=1.0, momentum=0.0, reliability=EXACT)
    apart, means = Apart(4), torch.zeros(0)
    for step in range(6):
        for rank in range(4):
            apart.step(rank, step)
        if step + 1 == 4:
            means = torch.stack([flat(each) for each in apart.models]).mean(0)
    expected = [0.5 * means + 0.5 * flat(each) for each in apart.models]
    for ours, theirs in zip(on_real(policy, 6), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_pairs_keep_the_mean_of_all_models_and_bring_them_together() -> None:
    policy = Gossip(every=1, outer_lr=1.0, momentum=0.0, reliability=EXACT)

    def work(rank: Rank) -> tuple[torch.Tensor, torch.Tensor]:
        put(rank.model, torch.full((flat(rank.model).numel(),), float(rank.rank)))
        for group in rank.optimizer.param_groups:
            group["lr"] = 0.0
        rank.train(1)
        once = flat(rank.model)
        rank.train(12)
        return once, flat(rank.model)

    found = on_ranks(perceptron(), sgd, work, policy=policy, world=4)
    firsts = sorted(float(once[0]) for once, _ in found)
    assert firsts[0] == firsts[1] and firsts[2] == firsts[3] and sum(firsts) == 6.0
    assert all(float((last - 1.5).abs().max()) < 0.5 for _, last in found)


class Neighbours(Gossip):
    """Gossip of ranks 0 and 1, and of ranks 2 and 3."""

    def partners(self, ranks: int, random: torch.Generator) -> list[int]:
        """Returns the other one of each pair."""
        return [rank ^ 1 for rank in range(ranks)]


@pytest.mark.parametrize(("outer_lr", "momentum"), [(1.0, 0.0), (0.7, 0.5)], ids=["the mean", "published"])
def test_without_loss_both_of_a_pair_have_what_the_plain_formula_says(outer_lr: float, momentum: float) -> None:
    policy = Neighbours(every=2, outer_lr=outer_lr, momentum=momentum, reliability=EXACT)
    apart = Apart(4)
    anchors, speeds = [flat(each) for each in apart.models], [torch.zeros(())] * 4
    for step in range(6):
        for rank in range(4):
            apart.step(rank, step)
        if step % 2 == 1:
            models = [flat(each) for each in apart.models]
            for rank in range(4):
                mean = (models[rank] + models[rank ^ 1]) / 2.0
                change = mean - anchors[rank]
                speeds[rank] = momentum * speeds[rank] + change
                anchors[rank] = anchors[rank] + outer_lr * (change + momentum * speeds[rank])
                if momentum == 0.0:
                    torch.testing.assert_close(anchors[rank], mean)
                put(apart.models[rank], anchors[rank])
    found = on_real(policy, 6)
    for ours, theirs in zip(found, apart.models, strict=True):
        torch.testing.assert_close(ours, flat(theirs), rtol=1e-5, atol=1e-6)
    assert not torch.equal(found[0], found[2])


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_streaming_of_one_fragment_without_delay_is_diloco_bit_for_bit(alpha: float) -> None:
    common: dict[str, Any] = {"every": 3, "outer_lr": 0.7, "momentum": 0.9, "alpha": alpha, "reliability": EXACT}
    expected = on_real(DiLoCo(**common), 10)
    for ours, theirs in zip(on_real(StreamingDiLoCo(fragments=1, delay=0, **common), 10), expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("policy", [AREA(every=2, at_least=2, pace="together"), MIFA(every=2)], ids=["AREA", "MIFA"])
def test_with_all_ranks_at_each_exchange_memories_change_nothing(policy: RankPolicy) -> None:
    expected = on_real(DiLoCo(every=2, outer_lr=1.0, momentum=0.0, reliability=EXACT), 8)
    lossless = type(policy)(**{**vars(policy), "reliability": EXACT})
    for ours, theirs in zip(on_real(lossless, 8), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_what_was_lost_is_contained_in_the_next_difference() -> None:
    policy = AREA(every=1, at_least=1, pace="together")

    def work(rank: Rank) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rank.train(12)
        rank.optimizer.session.wait()
        session = rank.optimizer.session
        memories = session._memories
        place = session.membership.index
        told = memories._ranks[0].vectors["told"]
        return told, memories.held.owned[0].vectors["mean"], torch.tensor(session.buckets[0].layout.spans[place])

    found = on_ranks(perceptron(), sgd, work, policy=policy, world=4, loss=0.3, seed=3)
    mean = torch.stack([told for told, _, _ in found]).mean(0)
    for _, owned, span in found:
        first, count = span.tolist()
        torch.testing.assert_close(owned, mean[first : first + count], rtol=1e-4, atol=1e-5)


def test_a_sparse_exchange_of_everything_is_local_sgd_but_for_its_rounding() -> None:
    policy = SparseDiLoCo(every=3, keep=256, answer=256, block=256, reliability=EXACT)
    expected = on_real(DiLoCo(every=3, outer_lr=1.0, momentum=0.0, reliability=EXACT), 3)
    start = flat(perceptron())
    for ours, theirs in zip(on_real(policy, 3), expected, strict=True):
        # Two magnitudes for all elements are coarse, but the direction must be the same.
        assert float(torch.nn.functional.cosine_similarity(ours - start, theirs - start, dim=0)) > 0.8


class Wide(SparseDiLoCo):
    """Sparse changes of 16 bits instead of 2."""

    @property
    def codes(self) -> tuple[Sparse, Sparse]:
        """Number formats of changes sent to owners and of parameters sent back."""
        return Sparse(keep=self.keep, of=self.block, bits=16), Sparse(keep=self.answer, of=self.block, bits=16)


def test_a_sparse_exchange_of_everything_in_more_bits_is_local_sgd() -> None:
    policy = Wide(every=3, decay=1.0, keep=256, answer=256, block=256, reliability=EXACT)
    expected = on_real(DiLoCo(every=3, outer_lr=1.0, momentum=0.0, reliability=EXACT), 9)
    for ours, theirs in zip(on_real(policy, 9), expected, strict=True):
        # Parameters are sent back in bfloat16, whose steps are 1/256.
        torch.testing.assert_close(ours, theirs, rtol=1 / 256, atol=2e-3)


@pytest.mark.thorough
def test_what_a_sparse_message_leaves_out_or_loses_stays_in_the_error() -> None:
    policy = SparseDiLoCo(every=1, decay=1.0, keep=8, answer=64, block=64)

    def work(rank: Rank) -> tuple[torch.Tensor, torch.Tensor]:
        session = rank.optimizer.session
        store = session._memories._ranks[0]
        rank.train(5)
        error, start = store.vectors["error"].clone(), store.vectors["start"].clone()
        for group in rank.optimizer.param_groups:
            group["lr"] = 0.0  # nothing more is learned
        rank.train(range(5, 60))
        assert torch.isfinite(start).all()
        return error, store.vectors["error"]

    for error, later in on_ranks(perceptron(), sgd, work, policy=policy, world=4, loss=0.3, seed=4):
        assert float(later.norm()) < 0.2 * float(error.norm())


def test_slower_ranks_make_fewer_steps_and_count_for_less() -> None:
    policy = DiLoCo(every=6, outer_lr=1.0, momentum=0.0, pace="fastest", reliability=EXACT)

    def work(rank: Rank) -> tuple[int, torch.Tensor]:
        # In the network's time, rank 0 takes three times as long for a step.
        session = rank.optimizer.session
        transport = session.group.transport
        step = 0
        while session.round_number < 1:
            regression(rank.model, vectors(rank.rank, step)).backward()  # type: ignore[no-untyped-call]
            transport.wait_view(1 << 30, 3.0 if rank.rank == 0 else 1.0)  # there is no such view: time passes
            rank.optimizer.step()
            rank.optimizer.zero_grad()
            step += 1
        return step, flat(rank.model)

    found = on_ranks(perceptron(), sgd, work, policy=policy, world=3)
    steps = [made for made, _ in found]
    assert steps[1] == steps[2] == 6 and 1 <= steps[0] <= 3
    apart = Apart(3)
    for rank, made in enumerate(steps):
        for number in range(made):
            apart.step(rank, number)
    weights = torch.tensor([float(made) for made in steps])
    expected = (torch.stack([flat(each) for each in apart.models]) * weights.unsqueeze(-1)).sum(0) / weights.sum()
    for _, values in found:
        torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [
        DiLoCo(every=3, reliability=LOSSY),
        StreamingDiLoCo(every=4, fragments=2, delay=1, bucket_mb=5e-4),
        Gossip(every=2),
        AREA(every=2, at_least=1, pace="together"),
        MIFA(every=2),
        SparseDiLoCo(every=2, keep=16, answer=64, block=256),
        DiLoCo(every=2, wire=torch.int8),
        AREA(every=2, at_least=1, pace="together", wire=torch.int8),
        MIFA(every=2, wire=torch.bfloat16),
    ],
    ids=["DiLoCo", "streaming", "gossip", "AREA", "MIFA", "sparse", "DiLoCo int8", "AREA int8", "MIFA bfloat16"],
)
def test_they_learn_on_a_network_that_loses(policy: RankPolicy) -> None:
    def work(rank: Rank) -> tuple[float, float]:
        losses = rank.train(60)
        return sum(losses[:6]), sum(losses[-6:])

    # Of all ranks together: batches of four are too noisy to judge one by.
    found = on_ranks(perceptron(), sgd, work, policy=policy, world=4, loss=0.2, seed=7)
    assert sum(last for _, last in found) < 0.97 * sum(first for first, _ in found)


def test_momentum_goes_on_in_shards_that_were_cut_anew() -> None:
    policy = DiLoCo(every=2, outer_lr=0.7, momentum=0.9, reliability=EXACT)

    def work(member: Member) -> tuple[torch.Tensor, torch.Tensor] | None:
        if member.rank == 2:
            member.train(4)
            member.die()
            return None
        member.train(12)
        member.session.wait()
        held = member.session._memories.held
        return held.owned[0].vectors["anchor"], held.owned[0].vectors["speed"]

    found = [each for each in with_members(work, world=4, make=sgd, policy=policy) if each is not None]
    assert sum(anchor.numel() for anchor, _ in found) == sum(speed.numel() for _, speed in found)
    assert all(float(speed.abs().min()) >= 0.0 and float(speed.norm()) > 0.0 for _, speed in found)


def test_masks_that_ranks_agree_on_cancel_out_in_the_mean() -> None:
    pytest.importorskip("cryptography")
    expected = on_real(DiLoCo(every=2, outer_lr=1.0, momentum=0.0, reliability=EXACT), 4)
    found = on_real(LightDp(every=2, mask=10.0, reliability=EXACT), 4)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_a_model_that_is_loaded_becomes_the_anchor() -> None:
    """Anchors of the previous parameters would pull the loaded ones back."""
    policy = DiLoCo(every=2, outer_lr=0.5, momentum=0.9, reliability=EXACT)
    other = perceptron()
    with torch.no_grad():
        for each in other.parameters():
            each.add_(1.0)

    def loads(rank: Rank) -> torch.Tensor:
        rank.train(4)
        rank.model.load_state_dict(other.state_dict())
        for group in rank.optimizer.param_groups:
            group["lr"] = 0.0
        rank.train(2)
        rank.optimizer.session.wait()
        return flat(rank.model)

    for found in on_ranks(perceptron(), sgd, loads, policy=policy, world=3):
        torch.testing.assert_close(found, flat(other))

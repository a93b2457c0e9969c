# mypy: disable-error-code="no-untyped-call"
# torch's own backward is untyped.
"""Policies under which every rank has its own model and optimizer (`RankPolicy`)."""

import copy
from collections.abc import Iterable

import pytest
import torch
from torch import nn

from stormtorch import EXACT, GradientAveraging, ModelAveraging, exact
from stormtorch.policies.policy import Policy
from training import (
    WORLD,
    Optimizer,
    Rank,
    adamw,
    assert_close,
    assert_same,
    on_ranks,
    perceptron,
    plain,
    regression,
    trained,
    values,
    vectors,
)

pytestmark = pytest.mark.pure

STEPS = 8


def simple(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("policy", [GradientAveraging(), GradientAveraging(reliability=EXACT, bucket_mb=1e-4)])
def test_gradient_averaging_without_loss_is_training_in_one_process(policy: Policy) -> None:
    for ours in trained(perceptron(), adamw, STEPS, policy=policy):
        assert_close(ours, plain(perceptron(), adamw, STEPS))


def test_gradient_averaging_adds_up_several_backwards() -> None:
    def data(rank: int, step: int) -> torch.Tensor:
        return torch.cat([vectors(rank, 2 * step + part) for part in range(2)])

    def work(rank: Rank) -> list[torch.Tensor]:
        for step in range(STEPS):
            for part in range(2):
                (regression(rank.model, vectors(rank.rank, 2 * step + part)) / 2).backward()
            rank.optimizer.step()
            rank.optimizer.zero_grad()
        return rank.values()

    for ours in on_ranks(perceptron(), simple, work, policy=GradientAveraging()):
        assert_close(ours, plain(perceptron(), simple, STEPS, data=data))


@pytest.mark.parametrize("policy", [ModelAveraging(), ModelAveraging(reliability=EXACT, bucket_mb=1e-4)])
def test_model_averaging_at_every_step_is_plain_sgd_where_nothing_is_lost(policy: Policy) -> None:
    for ours in trained(perceptron(), simple, STEPS, policy=policy):
        assert_close(ours, plain(perceptron(), simple, STEPS))


def test_model_averaging_every_few_steps_is_local_sgd() -> None:
    every = 3
    replicas = [Rank(rank, WORLD, model := perceptron(), adamw(model)) for rank in range(WORLD)]
    for step in range(2 * every):
        for rank in replicas:
            rank.train(range(step, step + 1))
        if (step + 1) % every == 0:
            means = [torch.stack(each).mean(0) for each in zip(*(values(rank.model) for rank in replicas), strict=True)]
            for rank in replicas:
                rank.model.load_state_dict(dict(zip(rank.model.state_dict(), means, strict=True)))

    def work(rank: Rank) -> list[torch.Tensor]:
        rank.train(2 * every)
        rank.model(vectors(0, 0))  # waits for the mean
        return values(rank.model)

    for ours in on_ranks(perceptron(), adamw, work, policy=ModelAveraging(every=every)):
        assert_close(ours, values(replicas[0].model))


def test_exact_is_the_mean_of_all_models_and_each_rank_has_its_own_again_afterwards() -> None:
    model = nn.Sequential(*perceptron(), nn.BatchNorm1d(6))

    def work(rank: Rank) -> list[list[torch.Tensor]]:
        rank.train(STEPS)
        rank.model(vectors(rank.rank, 0))
        before = values(rank.model)
        with exact(rank.model):
            within = [*values(rank.model), rank.model[3].running_mean.clone()]
        assert_same(values(rank.model), before)
        return [before, within]

    found = on_ranks(model, adamw, work, policy=ModelAveraging(every=100))
    means = [torch.stack(each).mean(0) for each in zip(*(before for before, _ in found), strict=True)]
    assert not torch.equal(found[0][0][0], found[1][0][0])
    for _, within in found:
        assert_close(within[:-1], means)
        assert_same(within, found[0][1])


def test_a_checkpoint_has_the_mean_model_and_every_rank_goes_on_with_it() -> None:
    def work(rank: Rank) -> list[torch.Tensor]:
        rank.train(STEPS)
        state = copy.deepcopy(rank.model.state_dict())
        assert_same(values(rank.model), list(state.values()))
        return list(state.values())

    found = on_ranks(perceptron(), adamw, work, policy=ModelAveraging(every=100))
    for ours in found:
        assert_same(ours, found[0])


@pytest.mark.thorough
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "not fused"])
@pytest.mark.parametrize("unscaling", [True, False], ids=["unscaled to clip", "as it is"])
@pytest.mark.parametrize("policy", [ModelAveraging(every=100), ModelAveraging(every=2), GradientAveraging()])
def test_a_rank_that_skips_a_step_still_takes_part(policy: Policy, unscaling: bool, fused: bool) -> None:
    make = lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)  # noqa: E731
    bad = (3, 1)  # step and rank

    def train(rank: Rank) -> float:
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for step in range(STEPS):
            loss = regression(rank.model, vectors(rank.rank, step))
            scaler.scale(loss * (torch.inf if (step, rank.rank) == bad else 1.0)).backward()
            if unscaling:
                scaler.unscale_(rank.optimizer)
                nn.utils.clip_grad_norm_(rank.model.parameters(), 0.5)
            scaler.step(rank.optimizer)
            scaler.update()
            rank.optimizer.zero_grad()
        return scaler.get_scale()

    def work(rank: Rank) -> tuple[float, list[torch.Tensor]]:
        scale = train(rank)
        rank.model(vectors(0, 0))
        found = values(rank.model)
        rank.values()
        return scale, found

    found = on_ranks(perceptron(), make, work, policy=policy)
    assert all(bool(each.isfinite().all()) for _, ours in found for each in ours)
    if policy == ModelAveraging(every=100):  # each has trained alone, and rank 1 has skipped a step
        assert [scale for scale, _ in found] == [256.0, 128.0, 256.0, 256.0]
        for number, (_, ours) in enumerate(found):
            alone = perceptron()
            train(Rank(number, WORLD, alone, make(alone)))
            assert_close(ours, values(alone))


@pytest.mark.parametrize(
    "policy, steps",
    [(GradientAveraging(), range(6)), (ModelAveraging(), range(6)), (ModelAveraging(every=2), (1, 3, 5))],
)
def test_the_ledger_names_steps_from_zero_and_peers_by_their_rank(policy: Policy, steps: Iterable[int]) -> None:
    def work(rank: Rank) -> None:
        rank.train(6)
        rank.model(vectors(0, 0))  # waits for the mean
        ledger = rank.optimizer.ledger
        assert [row.step for row in ledger] == list(steps)
        for row in ledger:
            assert set(row.gradients) == set(range(WORLD)) - {rank.rank}

    on_ranks(perceptron(), simple, work, policy=policy)

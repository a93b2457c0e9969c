"""The policies under which every rank has a model and an optimizer of its own."""

import copy

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
    trained,
    values,
    vectors,
)

STEPS = 8


def simple(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("policy", [GradientAveraging(), GradientAveraging(reliability=EXACT, bucket_mb=1e-4)])
def test_gradient_averaging_without_loss_is_training_in_one_process(policy: Policy) -> None:
    for ours in trained(perceptron(), adamw, STEPS, policy=policy):
        assert_close(ours, plain(perceptron(), adamw, STEPS))


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

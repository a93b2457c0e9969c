# mypy: disable-error-code="no-untyped-call"
# torch's own backward is untyped.
"""Gradients clipped sample by sample: against a loop over samples, and on prepared ranks."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from stormtorch import EXACT, BoundedDrift, ModelAveraging, Policy, exact, prepare
from stormtorch.checks import BadSetting
from stormtorch.collectives import Group
from stormtorch.exchange.exchange import Transport
from stormtorch.exchange.simulated import SimulatedNetwork
from stormtorch_lab.privacy import backward
from training import assert_close, assert_same, regression, values, vectors

pytestmark = pytest.mark.pure


def model_of() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.GroupNorm(3, 12), nn.Linear(12, 6))
    random = torch.Generator().manual_seed(0)  # ranks are threads, which share torch's own
    for each in model.parameters():
        nn.init.uniform_(each, -0.5, 0.5, generator=random)
    return model


def one_by_one(model: nn.Module, batch: torch.Tensor, clip: float) -> list[torch.Tensor]:
    """The mean of clipped gradients, sample by sample, in plain torch."""
    sums = [torch.zeros_like(each) for each in model.parameters()]
    for sample in batch:
        model.zero_grad()
        regression(model, sample.unsqueeze(0)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        for total, each in zip(sums, model.parameters(), strict=True):
            assert each.grad is not None
            total += each.grad
    model.zero_grad()
    return [each / len(batch) for each in sums]


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [each.grad for each in model.parameters() if each.grad is not None]


@pytest.mark.parametrize("at_once", [None, 1, 4, 100])
@pytest.mark.parametrize("clip", [0.05, 0.5, 3.0, math.inf])
def test_gradients_are_the_mean_of_clipped_ones(clip: float, at_once: int | None) -> None:
    model, batch = model_of(), vectors(0, 0, 10)
    expected = one_by_one(model, batch, clip)
    loss = backward(model, regression, batch, clip=clip, at_once=at_once)
    assert_close(gradients(model), expected, atol=1e-6)
    assert float(loss) == pytest.approx(float(regression(model, batch).detach()), rel=1e-5)


def test_no_sample_moves_the_sum_by_more_than_the_clipping_norm() -> None:
    model, batch, clip = model_of(), vectors(0, 0, 10), 0.1

    def total(samples: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        backward(model, regression, samples, clip=clip)
        return torch.cat([each.flatten() for each in gradients(model)]) * len(samples)

    whole = total(batch)
    for place in range(10):
        without = torch.cat([batch[:place], batch[place + 1 :]])
        assert float((whole - total(without)).norm()) <= clip * (1.0 + 1e-4)
    worse = batch.clone()
    worse[3] *= 1e6
    assert float((whole - total(worse)).norm()) <= 2.0 * clip * (1.0 + 1e-4)


def test_a_sample_without_a_finite_gradient_counts_as_zero() -> None:
    model, batch = model_of(), vectors(0, 0, 4)
    expected = [each * 3 / 4 for each in one_by_one(model, batch[:3], 0.1)]
    batch[3, 0] = math.inf
    backward(model, regression, batch, clip=0.1)
    assert_close(gradients(model), expected, atol=1e-6)


@pytest.mark.parametrize("policy", [BoundedDrift(reliability=EXACT), ModelAveraging(reliability=EXACT)])
def test_prepared_ranks_exchange_clipped_gradients(policy: Policy) -> None:
    clip, steps, world = 0.1, 3, 3

    def work(transport: Transport) -> list[torch.Tensor]:
        model = model_of()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
        prepare(model, optimizer, policy=policy, group=Group(transport))
        for step in range(steps):
            backward(model, regression, vectors(transport.rank, step), clip=clip)
            optimizer.step()
            optimizer.zero_grad()
        with exact(model):
            return values(model)

    model = model_of()
    for step in range(steps):
        means = [one_by_one(model, vectors(rank, step), clip) for rank in range(world)]
        with torch.no_grad():
            for each, *ranks in zip(model.parameters(), *means, strict=True):
                each -= 0.5 * torch.stack(ranks).mean(0)
    found = SimulatedNetwork(world, seed=1).run(work)
    for ours in found:
        assert_close(ours, values(model))
        assert_same(ours, found[0])


def test_parameters_that_are_on_their_way_are_an_error_that_names_the_setting() -> None:
    def work(transport: Transport) -> None:
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        prepare(model, optimizer, policy=BoundedDrift(overlap=True), group=Group(transport))
        backward(model, regression, vectors(transport.rank, 0), clip=1.0)
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(ValueError, match="set overlap=False"):
            backward(model, regression, vectors(transport.rank, 1), clip=1.0)

    SimulatedNetwork(2, seed=1).run(work)


def test_batches_of_tuples_are_taken_apart() -> None:
    model = nn.Linear(8, 2)
    given = vectors(0, 0, 6), torch.tensor([0, 1, 0, 1, 1, 0])

    def loss(called: Any, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(called(batch[0]), batch[1])

    backward(model, loss, given, clip=math.inf)
    ours = [each.clone() for each in gradients(model)]
    model.zero_grad()
    loss(model, given).backward()
    assert_close(ours, gradients(model))


def test_misuse_is_an_error_that_says_what_to_do() -> None:
    model, batch = model_of(), vectors(0, 0, 4)
    with pytest.raises(BadSetting, match="clip must be above 0"):
        backward(model, regression, batch, clip=0.0)
    with pytest.raises(ValueError, match="0 mixes samples by batch normalisation"):
        backward(nn.Sequential(nn.BatchNorm1d(8)), regression, batch, clip=1.0)
    with pytest.raises(ValueError, match="same number of samples first"):
        backward(model, regression, (batch, batch[:2]), clip=1.0)
    backward(model, regression, batch, clip=1.0)
    with pytest.raises(ValueError, match="zero_grad"):
        backward(model, regression, batch, clip=1.0)

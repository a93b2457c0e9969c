# mypy: disable-error-code="no-untyped-call"
# torch's own backward is untyped.
"""Corners of training loops: losses that share a trunk, accumulation, errors, values changed by hand."""

import contextlib
import time
from typing import Any

import pytest
import torch
from conftest import local_world
from torch import nn

from stormtorch import EXACT, BoundedDrift, ModelAveraging, prepare
from stormtorch.collectives import Group
from stormtorch.exchange.exchange import Transport
from stormtorch.policies.policy import Policy
from training import (
    EXACTLY,
    Rank,
    adamw,
    assert_close,
    assert_same,
    on_ranks,
    perceptron,
    plain,
    regression,
    sgd,
    values,
    vectors,
)

pytestmark = pytest.mark.pure

STEPS = 4


class Heads(nn.Module):
    """A trunk and two heads, each with a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.heads = nn.Linear(8, 16), nn.ModuleList([nn.Linear(16, 6), nn.Linear(16, 6)])

    def forward(self, given: torch.Tensor, head: int | None = None) -> torch.Tensor:
        y = self.trunk(given).tanh()
        out: torch.Tensor = self.heads[0](y) + self.heads[1](y).square() if head is None else self.heads[head](y)
        return out


def both(model: nn.Module, given: torch.Tensor) -> torch.Tensor:
    return sum(one_head(model, given, head) for head in range(2))  # type: ignore[return-value]


def one_head(model: nn.Module, given: torch.Tensor, head: int) -> torch.Tensor:
    out: torch.Tensor = model(given, head)
    return (out - given[:, :6].sin()).square().mean()


@pytest.mark.parametrize("policy", [EXACTLY, BoundedDrift()], ids=["exact", "drift"])
def test_losses_that_share_a_trunk_add_up_where_each_has_a_backward(policy: Policy) -> None:
    def work(rank: Rank) -> list[torch.Tensor]:
        for step in range(STEPS):
            for head in range(2):
                one_head(rank.model, vectors(rank.rank, step), head).backward()
            rank.optimizer.step()
            rank.optimizer.zero_grad()
        return rank.values()

    for ours in on_ranks(Heads(), sgd, work, policy=policy):
        assert_close(ours, plain(Heads(), sgd, STEPS, objective=both), rtol=1e-5, atol=1e-6)


def test_gradients_are_accumulated_after_the_models_own_zero_grad() -> None:
    parts = 3

    def data(rank: int, step: int) -> torch.Tensor:
        return torch.cat([vectors(rank, parts * step + part) for part in range(parts)])

    def work(rank: Rank) -> list[torch.Tensor]:
        for step in range(STEPS):
            for part in range(parts):
                with rank.model.no_sync() if part < parts - 1 else contextlib.nullcontext():
                    (regression(rank.model, vectors(rank.rank, parts * step + part)) / parts).backward()
            rank.optimizer.step()
            rank.model.zero_grad()
        return rank.values()

    for ours in on_ranks(perceptron(), sgd, work):
        assert_close(ours, plain(perceptron(), sgd, STEPS, data=data), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("policy", [EXACTLY, BoundedDrift(), ModelAveraging()], ids=["exact", "drift", "models"])
def test_what_is_loaded_is_not_overwritten_by_what_was_on_its_way(policy: Policy) -> None:
    other = perceptron(inside=2000, seed=5)
    models = [perceptron(inside=2000) for _ in range(2)]

    def body(transport: Transport) -> list[torch.Tensor]:
        model = models[transport.rank]
        _, optimizer = prepare(model, sgd(model), policy=policy, group=Group(transport, range(2)))
        Rank(transport.rank, 2, model, optimizer).train(2)
        if transport.rank:
            time.sleep(0.2)  # the other rank has loaded before this one's last message arrives
        model.load_state_dict(other.state_dict())
        model(vectors(0, 0))
        return values(model)

    for ours in local_world(2, body):
        assert_same(ours, values(other))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_may_be_clipped_by_hand(dtype: torch.dtype) -> None:
    def work(rank: Rank) -> float:
        for step in range(STEPS):
            regression(rank.model, vectors(rank.rank, step).to(dtype)).backward()
            rank.optimizer.step()
            rank.optimizer.zero_grad()
            with torch.no_grad():
                for each in rank.model.parameters():
                    each.clamp_(-0.01, 0.01)
        rank.optimizer.step()
        return max(float(each.abs().max()) for each in rank.values())

    policy = BoundedDrift(gradients=EXACT, broadcast=EXACT, overlap=False)
    for largest in on_ranks(perceptron().to(dtype), adamw, work, policy=policy):
        assert largest < 0.011


class Failing(torch.autograd.Function):
    """Fails in backward."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        return given.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise ValueError("in backward")


@pytest.mark.parametrize("bucket_mb", [16.0, 1e-5], ids=["one bucket", "many"])
def test_a_batch_whose_backward_fails_on_all_ranks_may_be_skipped(bucket_mb: float) -> None:
    def work(rank: Rank) -> list[torch.Tensor]:
        first, activation, last = rank.model
        for step in range(STEPS):
            rank.train(range(step, step + 1))
            loss = last(Failing.apply(activation(first(vectors(rank.rank, step))))).sum()
            with pytest.raises(ValueError, match="in backward"):
                loss.backward()
            rank.optimizer.zero_grad()
        return rank.values()

    policy = BoundedDrift(gradients=EXACT, broadcast=EXACT, bucket_mb=bucket_mb)
    for ours in on_ranks(perceptron(), sgd, work, policy=policy):
        assert_same(ours, plain(perceptron(), sgd, STEPS))

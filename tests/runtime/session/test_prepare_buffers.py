# mypy: disable-error-code="no-untyped-call"
# torch's own backward is untyped.
"""Buffers of a prepared model: replaced in forward, shared by several optimizers, saved by one rank alone."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from stormtorch import BoundedDrift, ModelAveraging, exact, prepare
from stormtorch.collectives import Group, barrier
from stormtorch.exchange.exchange import Transport
from stormtorch.exchange.simulated import SimulatedNetwork
from stormtorch.exchange.waiting import in_call
from stormtorch.policies.policy import Policy
from stormtorch.runtime.session.buffers import Buffers
from training import Rank, assert_close, assert_same, on_ranks, regression, sgd, vectors

pytestmark = pytest.mark.pure

STEPS = 12
POLICIES = pytest.mark.parametrize("policy", [BoundedDrift(), ModelAveraging(every=4)], ids=["drift", "averaging"])


class Replacing(nn.Module):
    """Running statistics of two sizes, each a new tensor in every forward, as people write them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 6)
        self.narrow: torch.Tensor
        self.wide: torch.Tensor
        self.register_buffer("narrow", torch.zeros(8))
        self.register_buffer("wide", torch.zeros(16))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        mean = given.mean(0)
        self.narrow = 0.9 * self.narrow + 0.1 * mean
        self.wide = 0.8 * self.wide + 0.2 * torch.cat([mean, mean.square()])
        out: torch.Tensor = self.layer(given)
        return out


def statistics(model: nn.Module) -> list[torch.Tensor]:
    return [each.detach().clone() for each in model.buffers() if each.is_floating_point()]


def mean_statistics(model: nn.Module, world: int, steps: int = STEPS) -> list[torch.Tensor]:
    """The mean of the statistics over ranks that each see their own inputs."""
    models = [copy.deepcopy(model) for _ in range(world)]
    for rank, each in enumerate(models):
        for step in range(steps):
            each(vectors(rank, step))
    return [torch.stack(ranks).mean(0) for ranks in zip(*map(statistics, models), strict=True)]


def normalised() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 6))


def saved_alone(rank: Rank) -> list[torch.Tensor]:
    """The statistics in a state dict that rank 0 alone requests, while the others wait elsewhere."""
    found = []
    if rank.rank == 0:
        state = rank.model.state_dict()
        found = [state[name].clone() for name, each in rank.model.named_buffers() if each.is_floating_point()]
    if isinstance(rank.optimizer.session.policy, BoundedDrift):
        rank.train(range(STEPS, STEPS + 1))  # forward has changed the statistics when they wait in backward
    else:
        with in_call("a barrier", elsewhere=True):
            barrier(rank.optimizer.session.group).wait()
    return found


def test_statistics_that_forward_replaces_are_averaged_by_name() -> None:
    def work(rank: Rank) -> list[torch.Tensor]:
        rank.train(STEPS)
        return saved_alone(rank)

    found = on_ranks(Replacing(), sgd, work, policy=BoundedDrift(), world=3)
    assert_close(found[0], mean_statistics(Replacing(), 3))


def test_buffers_that_forward_replaces_are_kept_once_and_forgotten_when_they_are_gone() -> None:
    model = Replacing()
    buffers, held = Buffers(model), []
    for step in range(50):
        model(vectors(0, step))
        held.append(model.narrow if step % 3 else model.wide)  # so that new ones do not always reuse the same memory
        buffers.remember()
        assert {name: tuple(each.shape) for name, each in buffers._snapshot.items()} == {"narrow": (8,), "wide": (16,)}
        assert_same(list(buffers._snapshot.values()), statistics(model))
    del model._buffers["wide"]
    buffers.remember()
    assert list(buffers._snapshot) == ["narrow"]


@POLICIES
def test_what_one_rank_saves_after_all_have_evaluated_is_what_they_had(policy: Policy) -> None:
    def work(rank: Rank) -> list[list[torch.Tensor]]:
        rank.train(STEPS)
        with exact(rank.model):
            seen = statistics(rank.model)
        return [seen, saved_alone(rank)]

    (seen, saved), *_ = on_ranks(normalised(), sgd, work, policy=policy, world=3)
    assert_close(seen, mean_statistics(normalised(), 3))
    assert_close(saved, seen, rtol=1e-6, atol=1e-7)


@POLICIES
def test_what_one_rank_saves_after_all_have_loaded_is_what_they_loaded(policy: Policy) -> None:
    def work(rank: Rank) -> list[torch.Tensor]:
        rank.train(STEPS)
        rank.model.load_state_dict({name: torch.full_like(each, 7) for name, each in normalised().state_dict().items()})
        return saved_alone(rank)

    found = on_ranks(normalised(), sgd, work, policy=policy, world=3)
    assert_same(found[0], [torch.full((8,), 7.0)] * 2)


def test_a_model_with_two_optimizers_has_its_statistics_averaged_once() -> None:
    def work(transport: Transport) -> list[torch.Tensor]:
        model = normalised()
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in model]
        for each in optimizers:
            prepare(model, each, group=Group(transport))

        def step(number: int) -> None:
            regression(model, vectors(transport.rank, number)).backward()
            for each in optimizers:
                each.step()
                each.zero_grad()

        for number in range(STEPS):
            step(number)
        saved: dict[str, Any] = model.state_dict() if transport.rank == 0 else {}
        found = [saved[name].clone() for name in ("0.running_mean", "0.running_var") if saved]
        step(STEPS)
        return found

    assert_close(SimulatedNetwork(3, seed=1).run(work)[0], mean_statistics(normalised(), 3))


def test_tables_that_nothing_changes_are_not_copied() -> None:
    model = normalised()
    model.register_buffer("table", torch.randn(50, generator=torch.Generator().manual_seed(1)))

    def work(rank: Rank) -> list[str]:
        for step in range(3):
            rank.train(range(step, step + 1))
            rank.model.state_dict()
        saved_alone(rank)
        return list(rank.optimizer.session._buffers._snapshot)

    assert on_ranks(model, sgd, work, policy=BoundedDrift(), world=3) == [["0.running_mean", "0.running_var"]] * 3

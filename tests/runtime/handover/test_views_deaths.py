"""Owners that become unreachable at a step: survivors train as one process does without their gradients."""

from typing import Any

import pytest
import torch
from torch import nn

from stormtorch import BoundedDrift
from training import MakeOptimizer, adamw, assert_same, perceptron, sgd, vectors
from views import EXACTLY, Member, plain_in_bfloat16, plain_without, survivors, with_members

pytestmark = pytest.mark.pure

STEPS, AT = 9, 4


class Rescaling(torch.optim.Optimizer):
    """A user's optimizer that needs whole parameters: it divides by the norm of the gradient."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as users write it
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    momentum = self.state[each].setdefault("momentum", torch.zeros_like(each))
                    momentum.mul_(0.9).add_(each.grad)
                    each.sub_(momentum / (momentum.norm() + 1e-3), alpha=group["lr"])


def rescaling(model: nn.Module) -> torch.optim.Optimizer:
    return Rescaling(model.parameters())


MAKERS = pytest.mark.parametrize("make", [adamw, sgd, rescaling], ids=["adamw", "sgd", "whole parameters"])


@MAKERS
@pytest.mark.parametrize(("world", "victim"), [(3, 0), (3, 1), (3, 2), (4, 0), (4, 1), (4, 2), (4, 3), (5, 0), (5, 3)])
def test_survivors_equal_a_process_that_leaves_the_dead_out(make: MakeOptimizer, world: int, victim: int) -> None:
    dying = {victim: AT}
    found = survivors(dying, STEPS, world=world, make=make)
    assert len(found) == world - 1
    for values in found.values():
        assert_same(values, plain_without(dying, STEPS, world=world, make=make))


@pytest.mark.thorough
@MAKERS
@pytest.mark.parametrize("dying", [{1: 3, 2: 6}, {0: 3, 1: 6}, {4: 3, 0: 4}, {3: 3, 2: 4}], ids=str)
def test_two_deaths_one_after_the_other_lose_nothing(make: MakeOptimizer, dying: dict[int, int]) -> None:
    found = survivors(dying, STEPS, world=5, make=make)
    assert len(found) == 3
    for values in found.values():
        assert_same(values, plain_without(dying, STEPS, world=5, make=make))


@pytest.mark.thorough
@pytest.mark.parametrize("make", [adamw, sgd])
@pytest.mark.parametrize("victim", range(4))
def test_model_in_bfloat16_keeps_the_bits_of_its_float32_values(make: MakeOptimizer, victim: int) -> None:
    model = perceptron().bfloat16()
    dying = {victim: AT}

    def work(member: Member) -> list[torch.Tensor] | None:
        data = lambda rank, step: vectors(rank, step).bfloat16()  # noqa: E731
        member.train(dying.get(member.rank, STEPS), data=data)
        if member.rank in dying:
            member.die()
            return None
        return member.values()

    expected = plain_in_bfloat16(dying, STEPS, world=4, make=make, model=model)
    for values in with_members(work, world=4, make=make, model=model):
        if values is not None:
            assert_same(values, expected)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("loss", [0.0, 0.2])
def test_nothing_depends_on_overlap_or_loss_where_everything_is_exact(overlap: bool, loss: float) -> None:
    policy = BoundedDrift(reliability=EXACTLY.reliability, bucket_mb=5e-4, overlap=overlap)
    for values in survivors({2: AT}, STEPS, world=4, make=adamw, policy=policy, loss=loss, seed=5).values():
        assert_same(values, plain_without({2: AT}, STEPS, world=4, make=adamw))

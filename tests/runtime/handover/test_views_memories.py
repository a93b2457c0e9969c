# mypy: disable-error-code="no-untyped-call"
# torch's own backward is untyped.
"""Owners drop their memory of a rank that leaves, and start it again when the rank rejoins: nothing stale remains."""

from typing import Any

import pytest
import torch

from stormtorch import EXACT
from stormtorch.policies.rank_policy import RankPolicy
from stormtorch_lab.policies import AREA, MIFA
from training import Vector
from views import Member, with_members

pytestmark = pytest.mark.pure

WORLD, VICTIM, SIZE = 3, 1, 24
POLICIES: dict[str, RankPolicy] = {
    "MIFA": MIFA(every=2, reliability=EXACT),
    "AREA": AREA(every=2, at_least=2, pace="together", reliability=EXACT),
}
by_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())


def target(rank: int) -> torch.Tensor:
    """The values to which a rank would converge if it were alone."""
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(rank)) + rank


def step(member: Member) -> None:
    model: Any = member.model
    (0.5 * (model.numbers - target(member.rank)).square().sum()).backward()
    member.optimizer.step()
    member.optimizer.zero_grad()


def train(member: Member, steps: int) -> None:
    for _ in range(steps):
        step(member)


def far(values: torch.Tensor, members: list[int]) -> float:
    """Distance to the optimum of some ranks, as a fraction of the initial distance."""
    optimum = torch.stack([target(rank) for rank in members]).mean(0)
    return float((values - optimum).norm() / optimum.norm())


def sgd(model: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@by_policy
def test_rank_that_is_gone_leaves_nothing_behind(policy: RankPolicy) -> None:
    def work(member: Member) -> torch.Tensor | None:
        train(member, 21)
        if member.rank == VICTIM:
            member.die()
            return None
        train(member, 80)
        return member.values()[0]

    others = [rank for rank in range(WORLD) if rank != VICTIM]
    for values in with_members(work, world=WORLD, model=Vector(SIZE), make=sgd, policy=policy):
        if values is not None:
            assert far(values, others) < 0.005


@pytest.mark.thorough
@by_policy
def test_rank_that_comes_back_is_counted_once(policy: RankPolicy) -> None:
    def work(member: Member) -> torch.Tensor:
        def until(count: int) -> None:
            while len(member.session.view.members) != count:
                step(member)
                member.transport.wait_view(1 << 62, 0.05)

        train(member, 21)
        if member.rank == VICTIM:
            member.die()
        else:
            until(WORLD - 1)
        if member.rank == 0:
            train(member, 10)
            member.network.set_unreachable(VICTIM, False)
        if member.rank != VICTIM:
            until(WORLD)
        while member.session.steps < 200:
            step(member)
        return member.values()[0]

    for values in with_members(work, world=WORLD, model=Vector(SIZE), make=sgd, policy=policy):
        assert far(values, list(range(WORLD))) < 0.005

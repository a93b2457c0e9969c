# mypy: disable-error-code="no-untyped-call"
# torch's own backward is untyped.
"""A checkpoint has the policy's memory: training continues with the same bits, and nothing is counted twice."""

import copy
from typing import Any

import pytest
import torch
from test_views_memories import far, sgd, train

from stormtorch import EXACT
from stormtorch.policies import DiLoCo
from stormtorch.policies.rank_policy import RankPolicy
from stormtorch_lab.policies import AREA, MIFA
from training import Rank, Vector, on_ranks, perceptron
from training import sgd as with_momentum
from views import Member, with_members

pytestmark = pytest.mark.pure

WORLD, EVERY = 3, 2
POLICIES: dict[str, RankPolicy] = {
    "MIFA": MIFA(every=EVERY, reliability=EXACT),
    "AREA": AREA(every=EVERY, at_least=EVERY, pace="together", reliability=EXACT),
    "DiLoCo": DiLoCo(every=EVERY, outer_lr=0.7, momentum=0.9, reliability=EXACT),
}
by_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())


def checkpoint(of: Any) -> dict[str, Any]:
    return copy.deepcopy({"model": of.model.state_dict(), "optimizer": of.optimizer.state_dict()})


@pytest.mark.thorough
@by_policy
@pytest.mark.parametrize("order", [("model", "optimizer"), ("optimizer", "model")], ids=["model first", "model last"])
def test_training_goes_on_bit_for_bit_from_a_checkpoint(policy: RankPolicy, order: tuple[str, str]) -> None:
    def whole(rank: Rank) -> tuple[dict[str, Any], list[torch.Tensor]]:
        rank.train(range(8))
        saved = checkpoint(rank)
        rank.train(range(8, 16))
        return saved, rank.values()

    begun = on_ranks(perceptron(), with_momentum, whole, policy=policy, world=WORLD)

    def rest(rank: Rank) -> list[torch.Tensor]:
        for which in order:
            getattr(rank, which).load_state_dict(begun[rank.rank][0][which])
        rank.train(range(8, 16))
        return rank.values()

    found = on_ranks(perceptron(seed=1), with_momentum, rest, policy=policy, world=WORLD)
    for ours, (_, expected) in zip(found, begun, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, expected, strict=True))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["MIFA", "AREA"])
@pytest.mark.parametrize("world", [WORLD, 2])
def test_checkpoint_of_one_rank_alone_is_counted_once(name: str, world: int, caplog: pytest.LogCaptureFixture) -> None:
    def begin(member: Member) -> dict[str, Any]:
        train(member, 4)
        return checkpoint(member)

    saved = with_members(begin, world=WORLD, model=Vector(24), make=sgd, policy=POLICIES[name])[0]

    def rest(member: Member) -> torch.Tensor:
        member.model.load_state_dict(saved["model"])
        member.optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
        train(member, 120)
        return member.values()[0]

    for values in with_members(rest, world=world, model=Vector(24), make=sgd, policy=POLICIES[name]):
        assert far(values, list(range(world))) < 0.005
    assert f"resets the memory of {name}: the checkpoint is that of rank 0 of 3" in caplog.text

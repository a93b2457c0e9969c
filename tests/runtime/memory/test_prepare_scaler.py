# mypy: disable-error-code="no-untyped-call"
# torch's own backward is untyped.
"""Only gradients of the same loss scale are averaged, also when a rank joins, rejoins or sets its scaler."""

from typing import Any

import pytest
import torch

from returning import with_a_rank_that_returns
from stormtorch import EXACT, BoundedDrift, GradientAveraging, prepare
from stormtorch.collectives import Group
from stormtorch.exchange.exchange import Transport
from stormtorch.policies.policy import Policy
from training import Vector
from views import Member, with_members

POLICIES: dict[str, Policy] = {
    "BoundedDrift": BoundedDrift(reliability=EXACT),
    "GradientAveraging": GradientAveraging(reliability=EXACT),
}
by_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
ONES = torch.ones(6)
# The scale of the members; a joining rank begins with torch's default, 64 times as large.
SCALE = 1024.0


def unit_steps(model: Any) -> torch.optim.SGD:
    """Each step subtracts 1 from every number, whichever ranks take part: gradients are 1 on all ranks."""
    return torch.optim.SGD(model.parameters(), lr=1.0)


def scaled_step(model: Any, optimizer: Any, scaler: Any) -> None:
    scaler.scale(model(ONES)).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def state_of(scaler: Any) -> tuple[float, int]:
    state = scaler.state_dict()
    return state["scale"], state["_growth_tracker"]


@by_policy
def test_rank_that_returns_takes_the_scale_of_the_others(policy: Policy) -> None:
    scalers: dict[int, Any] = {}

    def begin(transport: Transport, again: bool) -> tuple[Any, Any]:
        model = Vector(6)
        scalers[id(model)] = torch.amp.GradScaler("cpu", init_scale=65536.0 if again else SCALE)
        return prepare(model, unit_steps(model), policy=policy, group=Group(transport))

    def step(model: Any, optimizer: Any) -> None:
        scaled_step(model, optimizer, scalers[id(model)])
        steps[id(model)] = optimizer.session.steps

    steps: dict[int, int] = {}

    def look(model: Any) -> Any:
        return model.numbers.detach().clone(), steps[id(model)], state_of(scalers[id(model)])

    for numbers, made, state in with_a_rank_that_returns(begin, step, look):
        assert torch.equal(numbers, -torch.full((6,), float(made)))
        assert state == (SCALE, made)  # no step was skipped


@pytest.mark.pure
@by_policy
def test_rank_that_was_away_takes_the_scale_that_the_others_have_come_to(policy: Policy) -> None:
    def work(member: Member) -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=4)

        def train(until: int) -> None:
            while member.session.steps < until:
                scaled_step(member.model, member.optimizer, scaler)

        train(3)
        if member.rank == 2:
            member.session.wait()
            member.network.set_unreachable(2, True)
        while member.rank != 2 and len(member.session.view.members) > 2:
            scaled_step(member.model, member.optimizer, scaler)
        if member.rank == 0:
            train(member.session.steps + 9)
            member.network.set_unreachable(2, False)
        while member.rank != 2 and len(member.session.view.members) < 3:
            scaled_step(member.model, member.optimizer, scaler)
            member.transport.wait_view(1 << 62, 0.05)
        train(60)
        member.session.wait()
        return member.model.numbers.detach().clone(), member.session.steps, state_of(scaler)

    found = with_members(work, world=3, model=Vector(6), make=unit_steps, policy=policy)
    assert len({state for *_, state in found}) == 1, [state for *_, state in found]
    for numbers, made, _ in found:
        # The gradients of a rejoining rank belong to older parameters, and may count as zeros.
        torch.testing.assert_close(numbers, -torch.full((6,), float(made)), rtol=0.0, atol=0.34)


@pytest.mark.pure
@pytest.mark.parametrize("scaled_first", [True, False])
def test_rank_that_was_away_comes_back_with_a_step_of_another_kind(scaled_first: bool) -> None:
    """The members then make steps without a scaler while this rank is within one with a scaler; or the reverse."""

    def work(member: Member) -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)

        def turn() -> None:
            if (member.session.steps < 4) == scaled_first:
                return scaled_step(member.model, member.optimizer, scaler)
            member.model(ONES).backward()
            member.optimizer.step()
            member.optimizer.zero_grad()

        while member.session.steps < 3:
            turn()
        if member.rank == 2:
            member.session.wait()
            member.network.set_unreachable(2, True)
        while member.rank != 2 and (len(member.session.view.members) > 2 or member.session.steps < 12):
            turn()
        if member.rank == 0:
            member.network.set_unreachable(2, False)
        while member.rank != 2 and len(member.session.view.members) < 3:
            turn()
            member.transport.wait_view(1 << 62, 0.05)
        while member.session.steps < 60:
            turn()
        member.session.wait()
        return member.model.numbers.detach().clone(), member.session.steps

    for numbers, made in with_members(work, world=3, model=Vector(6), make=unit_steps, policy=POLICIES["BoundedDrift"]):
        torch.testing.assert_close(numbers, -torch.full((6,), float(made)), rtol=0.0, atol=0.34)


@pytest.mark.pure
@by_policy
def test_scale_that_one_rank_sets_costs_a_step_and_never_a_wrong_one(policy: Policy) -> None:
    def work(member: Member) -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        for number in range(6):
            if number == 2 and member.rank == 1:
                scaler.update(SCALE * 32)
            scaled_step(member.model, member.optimizer, scaler)
        return member.model.numbers.detach().clone(), member.events(), state_of(scaler), member.session.steps

    for numbers, events, state, made in with_members(work, world=3, model=Vector(6), make=unit_steps, policy=policy):
        assert made == 5
        assert torch.equal(numbers, torch.full((6,), -5.0))
        assert state == (SCALE / 2, 3)
        assert any("32768 on rank 1" in each and "go on from the least" in each for each in events), events


@pytest.mark.pure
@by_policy
def test_loss_that_one_rank_does_not_scale_is_refused(policy: Policy) -> None:
    def work(member: Member) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=member.rank != 2)
        with pytest.raises(ValueError, match=r"rank 2 has scaled its loss by no GradScaler, and rank 0 by 1024"):
            scaled_step(member.model, member.optimizer, scaler)

    with_members(work, world=3, model=Vector(6), make=unit_steps, policy=policy)


@pytest.mark.pure
def test_rank_without_data_may_give_zeros_that_no_scaler_has_scaled() -> None:
    def work(member: Member) -> torch.Tensor:
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        for number in range(3):
            if number == 1 and member.rank == 1:
                (member.model(ONES) * 0.0).backward()
                scaler.step(member.optimizer)
                scaler.update()
                member.optimizer.zero_grad()
            else:
                scaled_step(member.model, member.optimizer, scaler)
        member.session.wait()
        found: torch.Tensor = member.model.numbers.detach().clone()
        return found

    for numbers in with_members(work, world=3, model=Vector(6), make=unit_steps, policy=POLICIES["BoundedDrift"]):
        torch.testing.assert_close(numbers, torch.full((6,), -1.0 - 2 / 3 - 1.0))

"""Elastic mean, sum and gather over current members: they survive deaths and rejoins, and all survivors agree."""
# mypy: disable-error-code="no-untyped-call"

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from returning import with_a_rank_that_returns
from stormtorch import BoundedDrift, GradientAveraging, ModelAveraging, StormError, collectives, prepare
from stormtorch.collectives import Group
from stormtorch.exchange.exchange import Transport
from stormtorch.runtime.members.session_collectives import ranks_counted
from training import sgd
from views import EXACTLY, Member, with_members

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("policy", [EXACTLY, GradientAveraging(), ModelAveraging(every=2)], ids=lambda each: each.name)
def test_mean_sum_and_list_are_those_of_all_ranks(policy: Any) -> None:
    def work(member: Member) -> list[Any]:
        session, rank = member.session, member.rank
        member.train(2)
        half = torch.full((2, 3), rank, dtype=torch.bfloat16)
        given = {"rank": rank, "values": [rank] * rank, "tensor": torch.arange(rank)}
        found = [
            session.mean(float(rank)),
            session.mean(torch.tensor(rank, dtype=torch.float64)),
            session.mean(half),
            session.sum(torch.tensor([rank, 1])),
            session.mean(torch.tensor([rank, 1])),
            session.mean(torch.empty(0)),
            session.gather(given),
        ]
        member.train(4)
        return [*found, session.sum(1.0)]

    for number, scalar, half, summed, averaged, nothing, listed, ranks in with_members(
        work, world=3, make=sgd, policy=policy
    ):
        assert number == 1.0 and ranks == 3.0
        assert scalar.shape == () and scalar.dtype == torch.float64 and float(scalar) == 1.0
        assert half.dtype == torch.bfloat16 and half.tolist() == [[1.0] * 3] * 2
        assert summed.dtype == torch.int64 and summed.tolist() == [3, 3] and averaged.tolist() == [1.0, 1.0]
        assert nothing.shape == (0,)
        assert [(rank, each["values"]) for rank, each in listed.items()] == [(0, []), (1, [1]), (2, [2, 2])]
        assert listed[2]["tensor"].tolist() == [0, 1]


def test_where_two_die_within_a_call_all_count_the_same_or_say_that_they_cannot_know() -> None:
    """One of the two reaches any subset of the others with its value, the other with its report of received values."""
    everyone, said = [*range(5)], 0
    alive = [2, 3, 4]
    subsets = [{each for place, each in enumerate(alive) if bits >> place & 1} for bits in range(8)]
    # Rank 0 dies while it sends its value: some ranks have it. Rank 1 may have it, and dies while it reports.
    for has_first, first_reached, told in itertools.product([False, True], subsets, subsets):
        here = {rank: {1, 2, 3, 4} | ({0} if rank in first_reached else set()) for rank in alive}
        here[1] = {1, 2, 3, 4} | ({0} if has_first else set())
        results = []
        for rank in alive:
            known = {each: here[each] for each in alive} | ({1: here[1]} if rank in told else {})
            count, unsure = ranks_counted(everyone, here[rank], known, ())
            if unsure:
                said += 1
                assert {*unsure} == {0, 1}
            else:
                results.append(count)
        assert all(each == results[0] for each in results)
    assert said
    # A machine with two ranks dies, and all ranks know it before they report: the dead ones cannot have reported.
    full = {rank: {*everyone} for rank in alive}
    assert ranks_counted(everyone, full[2], full, {0, 1}) == ({*everyone}, [])


@pytest.mark.thorough
@pytest.mark.parametrize("victim", range(3))
@pytest.mark.parametrize("sends", [False, True], ids=["before the call", "within it"])
@pytest.mark.parametrize("seed", range(4))
def test_call_goes_on_without_a_rank_that_dies_and_those_who_are_left_agree(
    victim: int, sends: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(member: Member) -> list[Any] | None:
        session = member.session
        found = []
        for step in range(1, 7):
            member.train(step)
            if member.rank == victim and step == 3:
                if sends:
                    # Part of it may arrive, and the rank is unreachable after that.
                    name = f"{session.name}/together/0"
                    group = Group(member.transport, session.view.members, name=name, view=1).on_channel(name)
                    rows = [torch.zeros(1, dtype=torch.float64) for _ in range(3)]
                    rows[victim].fill_(victim)
                    kept.append(collectives.all_gather(group, rows, rows[victim]))
                    kept[-1].done()
                member.network.set_unreachable(victim, True)
                return None
            found.append((session.mean(float(member.rank)), session.gather(step)))
        return found

    kept: list[Any] = []
    before, *others = (each for each in with_members(work, world=3, make=sgd, seed=seed, loss=0.3) if each is not None)
    assert others == [before]
    left = [rank for rank in range(3) if rank != victim]
    assert before[0] == (1.0, {0: 1, 1: 1, 2: 1})
    assert before[2][0] in (1.0, sum(left) / 2)
    assert before[-1] == (sum(left) / 2, dict.fromkeys(left, 6))


def test_rank_that_returns_takes_part_from_its_first_step_on() -> None:
    def begin(transport: Transport, again: bool) -> tuple[nn.Module, Any]:
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        prepare(model, optimizer, policy=BoundedDrift(), group=Group(transport))
        optimizer.again = again  # type: ignore[attr-defined]
        return model, optimizer

    def step(model: nn.Module, optimizer: Any) -> None:
        rank, began = optimizer.session.group.transport.rank, optimizer.session.steps
        new = optimizer.again and began == optimizer.session.view.step
        loss = model(torch.randn(2, 4)).square().mean()
        early = optimizer.session.gather(rank)
        assert early.keys() == {rank} if new else rank in early
        loss.backward()
        optimizer.session.mean(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        members = optimizer.session.gather(rank)
        assert members == {each: each for each in optimizer.session.view.members}

    found = with_a_rank_that_returns(begin, step, lambda model: 1)
    assert found == [1, 1, 1]


def test_calls_after_different_numbers_of_steps_are_an_error_on_every_rank() -> None:
    def work(member: Member) -> str:
        member.train(2 if member.rank == 1 else 1)
        with pytest.raises(StormError) as raised:
            member.session.mean(1.0)
        return str(raised.value)

    said = with_members(work, world=3, make=sgd, policy=ModelAveraging(every=4))
    assert said[0] == (
        "rank 0: session.mean() after 1 steps, but rank 1 has made 2: call it on every rank, at the same step"
    )
    assert "rank 1: session.mean() after 2 steps, but rank 0 has made 1" in said[1]

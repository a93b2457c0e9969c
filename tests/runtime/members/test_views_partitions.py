"""Network partitions: only the side with a quorum continues, outages exclude no rank, and bits are equal afterwards."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from stormtorch import BoundedDrift, StormError
from training import adamw, assert_same, sgd
from views import EXACTLY, Member, all_same, plain_without, with_members

pytestmark = pytest.mark.pure

AT = 4
PAUSE_S = 0.5
"""Virtual time of a step: a few steps outlast every wait."""


def cut(member: Member, sides: Iterable[tuple[int, int]], dark: bool) -> None:
    for source, target in sides:
        member.network.set_link(source, target, dark)


def between(one: Iterable[int], other: Iterable[int]) -> list[tuple[int, int]]:
    pairs = [(a, b) for a in one for b in other]
    return pairs + [(b, a) for a, b in pairs]


def walk(member: Member, until_s: float, steps: list[tuple[float, int]] | None = None) -> None:
    """Trains until a point of virtual time."""
    while member.network.now_s < until_s:
        member.step(member.session.steps)
        if steps is not None:
            steps.append((member.network.now_s, member.session.steps))
        member.transport.wait_view(1 << 62, PAUSE_S)


def finish(member: Member, steps: int) -> Any:
    member.train(steps)
    return member.values(), member.session.view, member.events()


@pytest.mark.thorough
@pytest.mark.parametrize(("world", "minority"), [(4, (3,)), (5, (0, 1)), (5, (3, 4)), (4, (2, 3)), (3, (0,))], ids=str)
def test_only_the_majority_steps_and_all_are_equal_after_healing(world: int, minority: tuple[int, ...]) -> None:
    majority = [rank for rank in range(world) if rank not in minority]

    def work(member: Member) -> Any:
        member.train(AT)
        began = member.network.now_s
        if member.rank == majority[0]:
            member.session.wait()
            cut(member, between(minority, majority), True)
        steps: list[tuple[float, int]] = []
        if member.rank in majority:
            walk(member, began + 8.0, steps)
            if member.rank == majority[0]:
                cut(member, between(minority, majority), False)
        walk(member, began + 20.0, steps)
        return steps, finish(member, 50)

    found = with_members(work, world=world, make=adamw)
    for rank, (steps, (_, view, _)) in enumerate(found):
        apart = [number for now_s, number in steps if now_s < 8.0]
        if rank in minority:
            assert not apart or max(apart) <= AT + 2, "a minority has stepped"
        else:
            assert max(apart) > AT + 5, "the majority has not gone on"
        assert view.members == tuple(range(world))
    assert len({view.number for _, (_, view, _) in found}) == 1
    assert all_same([values for _, (values, *_) in found])


def test_one_directed_link_that_is_dead_costs_one_rank_and_no_bits() -> None:
    def work(member: Member) -> Any:
        member.train(AT)
        if member.rank == 1:
            member.session.wait()
            cut(member, [(1, 2)], True)
        if member.rank != 2:
            walk(member, 8.0)
        members = member.session.view.members
        if member.rank == 0:
            cut(member, [(1, 2)], False)
        walk(member, 20.0)
        return members, finish(member, 50)

    found = with_members(work, world=4, make=adamw)
    assert {members for members, _ in found if 2 not in members} == {(0, 1, 3)}
    assert all_same([values for _, (values, *_) in found])
    assert {(view.number, view.members) for _, (_, view, _) in found} == {(found[0][1][1].number, (0, 1, 2, 3))}


@pytest.mark.thorough
@pytest.mark.parametrize("outage_s", [12.0, 40.0, 120.0])
def test_outage_of_everything_throws_nobody_out_and_loses_no_bits(outage_s: float) -> None:
    everyone = range(4)
    took: dict[int, float] = {}

    def work(member: Member) -> Any:
        member.train(AT)
        member.session.wait()
        for rank in everyone if member.rank == 0 else ():
            member.network.set_unreachable(rank, True)
        healed_at = member.network.now_s + outage_s
        if member.rank == 0:
            member.transport.wait_view(1 << 62, outage_s)
            for rank in everyone:
                member.network.set_unreachable(rank, False)
        member.train(AT + 1)
        took[member.rank] = member.network.now_s - healed_at
        return finish(member, 12)

    found = with_members(work, world=4, make=adamw)
    assert max(took.values()) < 5.0, took
    for values, view, _ in found:
        assert view.members == (0, 1, 2, 3)
        assert_same(values, plain_without({}, 12, world=4, make=adamw))


@pytest.mark.thorough
@pytest.mark.parametrize("away", range(4))
def test_rank_that_was_away_returns_with_the_parameters_of_the_others(away: int) -> None:
    def work(member: Member) -> Any:
        member.train(AT)
        if member.rank == away:
            member.die()
        helper = (away + 1) % 4
        walk(member, 7.0)
        if member.rank == helper:
            member.network.set_unreachable(away, False)
        walk(member, 18.0)
        return finish(member, 50)

    found = with_members(work, world=4, make=adamw)
    assert all_same([values for values, *_ in found])
    for rank, (_, view, events) in enumerate(found):
        assert view.members == (0, 1, 2, 3)
        if rank != away:
            assert any(f"rank {away} is gone" in event for event in events)
        assert any(f"rank {away} is new" in event or f"rank {away} is back" in event for event in events)


def test_rank_that_is_not_let_in_again_gives_up_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(member: Member) -> str:
        member.train(AT)
        member.session.wait()
        if member.rank == 2:
            cut(member, [(2, 0), (2, 1)], True)  # it receives from the others, but they do not receive from it
            with pytest.raises(StormError, match=r"rank 2: has waited") as caught:
                member.train(AT + 1)
            return str(caught.value)
        walk(member, 8.0)
        return ""

    policy = BoundedDrift(reliability=EXACTLY.reliability, give_up_s=0.05)
    said = with_members(work, world=3, make=sgd, policy=policy)[2]
    assert "give_up_s" in said and "to be admitted again by a majority" in said, said


@pytest.mark.parametrize("loss", [0.1, 0.3])
def test_loss_alone_never_changes_the_view(loss: float) -> None:
    def work(member: Member) -> Any:
        walk(member, 10.0)
        return finish(member, 40)

    found = with_members(work, world=4, make=sgd, policy=BoundedDrift(), loss=loss, seed=3)
    assert {view.number for _, view, _ in found} == {1}
    assert all_same([values for values, *_ in found])
    assert all(torch.isfinite(each).all() for values, *_ in found for each in values)

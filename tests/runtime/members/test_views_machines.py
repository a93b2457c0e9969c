"""Ranks that share machines and die: the round is repeated without them, whichever exchange was running."""

from collections.abc import Iterator
from typing import Any

import pytest

from stormtorch import EXACT, BoundedDrift
from stormtorch.collectives import hierarchy
from stormtorch.exchange.exchange import Plan
from training import adamw, assert_close
from views import Member, all_same, plain_without, survivors, with_members

pytestmark = pytest.mark.pure

STEPS, AT = 8, 4


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets small models use the hierarchical exchange."""
    monkeypatch.setattr(hierarchy, "_SMALLEST_BYTES", 0)
    yield


def by_machines(member: Member) -> bool:
    return member.session._broadcast._hierarchical is not None


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("layout", "victim"), [("aabb", 0), ("aabb", 3), ("ababab", 1), ("aabbcc", 4)])
def test_survivors_equal_a_process_that_leaves_the_dead_out(layout: str, victim: int, overlap: bool) -> None:
    policy = BoundedDrift(reliability=EXACT, bucket_mb=5e-4, overlap=overlap)
    dying, world = {victim: AT}, len(layout)
    found = survivors(dying, STEPS, world=world, make=adamw, policy=policy, machines=layout)
    assert len(found) == world - 1 and all_same(list(found.values()))
    assert_close(found[(victim + 1) % world], plain_without(dying, STEPS, world=world, make=adamw))


@pytest.mark.parametrize(("dying", "ways"), [({0: AT, 3: AT}, [True, True]), ({0: AT, 2: AT}, [True, False])], ids=str)
def test_each_view_chooses_its_way_by_who_is_left(dying: dict[int, int], ways: list[bool]) -> None:
    def work(member: Member) -> Any:
        found = [by_machines(member)]
        member.train(dying.get(member.rank, AT))
        if member.rank in dying:
            member.die()
            return None
        member.train(STEPS)
        return [*found, by_machines(member)], member.values()

    found = [each for each in with_members(work, world=6, make=adamw, machines="abcabc") if each is not None]
    assert [each for each, _ in found] == [ways] * 4
    assert all_same([each for _, each in found])
    assert_close(found[0][1], plain_without(dying, STEPS, world=6, make=adamw))


class Dead(Exception):
    """Ends the program of a rank that has become unreachable."""


# The exchanges that a rank begins in a step, one bucket: two inside its machine for gradients, its report, one between
# machines, two with standbys, then parameters between, inside, and two to forward them.
_POSTS = 10


@pytest.mark.thorough
@pytest.mark.parametrize("moment", range(_POSTS))
@pytest.mark.parametrize("victim", [0, 3])
def test_survivors_go_on_together_whichever_exchange_a_rank_dies_in(moment: int, victim: int) -> None:
    begun: list[str] = []

    def work(member: Member) -> Any:
        member.train(AT)
        if member.rank != victim:
            member.train(STEPS)
            return member.values(), member.session.view.members, by_machines(member)
        member.session.wait()
        begin = member.transport.post

        def post(plan: Plan) -> Any:
            if len(begun) == moment:
                member.network.set_unreachable(victim, True)
                raise Dead
            begun.append(plan.what)
            return begin(plan)

        member.transport.post = post  # type: ignore[method-assign]
        with pytest.raises(Dead):
            member.train(STEPS)
        return None

    policy = BoundedDrift(reliability=EXACT)
    found = [each for each in with_members(work, world=4, make=adamw, policy=policy, machines="aabb") if each]
    assert len(begun) == moment
    assert len(found) == 3 and all_same([each for each, *_ in found])
    assert all(members == tuple(rank for rank in range(4) if rank != victim) for _, members, _ in found)
    assert not any(way for *_, way in found)
    # Its gradients of the last step count or not, depending on what it had sent.
    last, first = (plain_without({victim: at}, STEPS, world=4, make=adamw) for at in (AT, AT + 1))
    for ours, one, other in zip(found[0][0], last, first, strict=True):
        assert float((ours - one).abs().max()) <= float((other - one).abs().max()) + 0.01

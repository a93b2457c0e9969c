"""A rank leaves while another one rejoins: the remaining ranks send the state that joining ranks need."""

from typing import Any

import pytest

from stormtorch import BoundedDrift, DiLoCo, GradientAveraging, ModelAveraging
from stormtorch.policies.policy import Policy
from training import adamw, sgd
from views import Member, all_same, with_members

pytestmark = pytest.mark.pure

WORLD, AT, STEPS = 4, 4, 120
PAUSE_S = 0.25


def together(after_s: float) -> tuple[list[Any], set[str]]:
    """Rank 0 leaves some time after rank 3 is reachable again. Returns the other ranks' results, and ledger events."""

    def work(member: Member) -> Any:
        member.train(AT)
        began = member.network.now_s
        if member.rank == 1:
            member.session.wait()
            member.network.set_unreachable(3, True)
        healed_s = began + 8.0
        leaves_s = healed_s + after_s
        healed = False
        while member.network.now_s < healed_s + 6.0:
            now_s = member.network.now_s
            if member.rank == 1 and now_s >= healed_s and not healed:
                member.network.set_unreachable(3, False)
                healed = True
            if member.rank == 0 and now_s >= leaves_s:
                member.session.wait()
                member.transport.request_leave()
                member.session.transfer_and_leave()
                return None
            member.step(member.session.steps)
            member.transport.wait_view(1 << 62, PAUSE_S)
        member.train(STEPS)
        return member.values(), member.events()

    found = [each for each in with_members(work, world=WORLD, make=adamw) if each is not None]
    return [values for values, _ in found], {event for _, events in found for event in events}


@pytest.mark.thorough
@pytest.mark.parametrize(("after_s", "at_once"), [(-0.2, True), (0.3, False)])
def test_a_newcomer_gets_all_where_the_lowest_rank_leaves(after_s: float, at_once: bool) -> None:
    values, events = together(after_s)
    assert len(values) == WORLD - 1
    assert all_same(values)
    assert at_once == any("rank 0 is gone; rank 3 is new" in each for each in events), events


@pytest.mark.parametrize(
    "policy",
    [
        BoundedDrift(bucket_mb=5e-4),
        DiLoCo(every=2, bucket_mb=5e-4),
        ModelAveraging(bucket_mb=5e-4),
        GradientAveraging(bucket_mb=5e-4),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_rank_leaves_when_the_others_have_begun_their_next_round(policy: Policy) -> None:
    def work(member: Member) -> Any:
        member.train(5)
        if member.rank == 1:
            member.session.wait()
            member.transport.wait_view(1 << 62, 1.0)
            member.transport.request_leave()
            member.session.transfer_and_leave()
            return None
        member.train(24)
        return member.session.view, member.session.membership.round

    found = [each for each in with_members(work, world=WORLD, make=sgd, policy=policy) if each is not None]
    assert len(found) == WORLD - 1 and len({rounds for _, rounds in found}) == 1
    assert all(view.members == (0, 2, 3) and view.number == 2 for view, _ in found)

"""Members by themselves: who is missing, for how long, and which rank is the one that is cut off."""

import pytest

from member_ranks import Clock, hear
from stormtorch import StormError
from stormtorch.collectives import Group
from stormtorch.runtime import members as module
from stormtorch.runtime.members import Members
from stormtorch.transport.simulated import SimulatedNetwork

pytestmark = pytest.mark.pure


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def members_of(world: int, rank: int = 0, *, warn_every: int = 100, give_up_s: float = 60.0) -> Members:
    """Without a store."""
    transport = SimulatedNetwork(world).run(lambda transport: transport)[rank]
    return Members(Group(transport), "t", warn_every, give_up_s)


# --- those that are there ---------------------------------------------------------------------------------------------


def test_nobody_is_missing_while_all_are_heard_of() -> None:
    members = members_of(4)
    for step in range(5):
        assert hear(members, 1, 2, 3, step=step) == ([], [])
    assert members.lowest == 0
    assert not members.cut_off and not members.restarted


def test_a_rank_that_falls_silent_is_told_of_once_and_named_at_every_step(clock: Clock) -> None:
    members = members_of(4)
    assert hear(members, 1, 3, step=0) == ([2], ["rank 2 is missing"])
    assert hear(members, 1, 3, step=1) == ([2], [])
    assert hear(members, 1, step=2) == ([2, 3], ["rank 3 is missing"])
    assert hear(members, 1, 2, step=3) == ([3], ["rank 2 is back"])
    assert hear(members, 1, 2, 3, step=4) == ([], ["rank 3 is back"])
    assert hear(members, 1, 2, 3, step=5) == ([], [])


def test_the_lowest_rank_is_the_lowest_that_is_there() -> None:
    members = members_of(4, rank=2)
    hear(members, 1, 3)
    assert members.lowest == 1
    hear(members, 3)
    assert members.lowest == 2


def test_the_warning_is_repeated_and_says_how_long_ago_a_rank_was_heard_of(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    members = members_of(3, warn_every=2)
    clock.now_s += 100.0
    hear(members, 1, 2, step=0)
    for step in range(1, 6):
        clock.now_s += 1.5
        hear(members, 2, step=step)
    said = [text for text in caplog.messages if "nothing is heard of rank 1" in text]
    assert len(said) == 3
    for text, step, seconds in zip(said, (1, 3, 5), ("1.5", "4.5", "7.5"), strict=True):
        assert text.startswith("rank 0: ")
        assert f"at step {step}, and its last report came {seconds} s ago" in text


def test_a_rank_that_is_missing_for_too_long_ends_the_job_and_is_named_with_the_knob(clock: Clock) -> None:
    members = members_of(3, give_up_s=10.0)
    hear(members, 2, step=0)
    clock.now_s += 10.0
    assert hear(members, 2, step=1) == ([1], [])
    clock.now_s += 0.5
    with pytest.raises(StormError, match=r"rank 0: rank 1 has been missing for 10 s: .*give_up_s \(10\)") as raised:
        hear(members, 2, step=2)
    assert raised.value.culprit == 1


def test_the_time_of_a_rank_that_came_back_begins_anew(clock: Clock) -> None:
    members = members_of(3, give_up_s=10.0)
    for step, heard in enumerate([(2,), (1, 2), (2,), (1, 2), (2,)]):
        clock.now_s += 8.0
        hear(members, *heard, step=step)


def test_the_culprit_is_a_rank_of_the_transport_where_a_group_counts_otherwise(clock: Clock) -> None:
    transport = SimulatedNetwork(4).run(lambda transport: transport)[3]
    members = Members(Group(transport, [3, 2, 0]), "t", 100, 10.0)
    hear(members, 2)
    clock.now_s += 11.0
    with pytest.raises(StormError, match="rank 0: rank 1 has been missing") as raised:
        hear(members, 2)
    assert raised.value.culprit == 2


# --- who is cut off ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "rank", "heard", "cut_off"),
    [
        (4, 3, (), True),
        (4, 3, (0,), False),  # of two halves, the one with the lowest rank goes on
        (4, 3, (2,), True),
        (4, 0, (), True),
        (4, 0, (3,), False),
        (4, 1, (2, 3), False),
        (5, 0, (1,), True),
        (5, 4, (2, 3), False),
        (2, 0, (), False),
        (2, 1, (), True),
    ],
)
def test_who_hears_fewer_than_half_is_the_one_that_is_lost(
    world: int, rank: int, heard: tuple[int, ...], cut_off: bool
) -> None:
    members = members_of(world, rank=rank)
    missing, events = hear(members, *heard)
    assert members.cut_off == cut_off
    assert missing == sorted(set(range(world)) - {rank, *heard})
    assert bool(events) != cut_off  # it is no news of others that this rank hears nothing


def test_half_is_counted_of_those_that_were_there() -> None:
    members = members_of(5, rank=2)
    for heard in [(1, 3, 4), (3, 4), (3,)]:
        hear(members, *heard)
        assert not members.cut_off
    hear(members)  # rank 3 dies as well, and this is the lowest that is left
    assert not members.cut_off
    assert members.lowest == 2


def test_a_rank_that_is_cut_off_forgets_nobody_and_goes_on_when_it_hears_them_again(clock: Clock) -> None:
    members = members_of(4, rank=3, give_up_s=10.0)
    hear(members)
    assert members.lowest == 0
    clock.now_s += 100.0  # others are not given up by a rank that is itself the one that is lost
    hear(members)
    assert members.cut_off
    assert hear(members, 0, 1, 2) == ([], [])
    assert hear(members, 0, 1) == ([2], ["rank 2 is missing"])


def test_without_a_store_nobody_can_return() -> None:
    members = members_of(3)
    hear(members, 2)
    assert members.look(1) is None
    with pytest.raises(StormError, match="rank 0: it is cut off from the others, and has no store") as raised:
        members.ask_in()
    assert raised.value.culprit == 0

"""Resharding plans: every range of every shard reaches its new owner and its standby exactly once."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stormtorch.runtime.handover.moves import MoveSource, Partition, orphans, plan_moves
from stormtorch.runtime.handover.standby import standby_of
from stormtorch.runtime.memory.layout import Layout, plan, repartition

pytestmark = pytest.mark.pure

ITEM_BYTES = 4


def layouts_for(counts: list[int], owners: int, *, whole: bool, bucket_bytes: float) -> list[Layout]:
    return plan(counts, ITEM_BYTES, bucket_bytes, owners, whole=whole)


def partition(planned: list[Layout], members: tuple[int, ...], standbys: int, *, whole: bool) -> Partition:
    count = len(members)
    layouts = [
        repartition(each, ITEM_BYTES, count, whole=whole, first_owner=place % count)
        for place, each in enumerate(planned)
    ]
    return Partition(members, layouts, standbys)


members = st.sets(st.integers(0, 9), min_size=1, max_size=7).map(lambda each: tuple(sorted(each)))


@given(
    counts=st.lists(st.integers(1, 300), min_size=1, max_size=8),
    whole=st.booleans(),
    standbys=st.integers(0, 1),
    bucket_bytes=st.sampled_from([100.0, 900.0, 1e6]),
    before=members,
    after=members,
    data=st.data(),
)
def test_every_range_is_given_exactly_once_to_its_owner_and_its_standby(
    counts: list[int],
    whole: bool,
    standbys: int,
    bucket_bytes: float,
    before: tuple[int, ...],
    after: tuple[int, ...],
    data: st.DataObject,
) -> None:
    planned = layouts_for(counts, 4, whole=whole, bucket_bytes=bucket_bytes)
    old, new = (partition(planned, each, standbys, whole=whole) for each in (before, after))
    there = data.draw(st.sets(st.sampled_from(before), min_size=1))
    followed = [shard for shard, owner in enumerate(before) if {owner, old.standby(shard)} <= there]
    equal = data.draw(st.sets(st.sampled_from(followed))) if followed else set()
    lost = orphans(old, there)
    freshest = {shard: data.draw(st.sampled_from(sorted(there))) for shard in lost}
    moves = plan_moves(old, new, there, equal, freshest)
    got: dict[tuple[int, bool, int], Counter[int]] = {}
    for move in moves:
        begin, count = old.layouts[move.bucket].spans[move.shard]
        assert begin <= move.first and move.first + move.count <= begin + count, "a range of another shard"
        assert move.sender in there, "somebody gives who is gone"
        owner, standby = before[move.shard], old.standby(move.shard)
        if move.source is MoveSource.OWNER:
            assert move.sender == owner
        elif move.source is MoveSource.STANDBY:
            assert move.sender == standby
            assert owner not in there or (move.receiver == standby and move.shard in equal)
        else:
            assert move.shard in lost and move.sender == freshest[move.shard]
        got.setdefault((move.bucket, move.as_standby, move.receiver), Counter()).update(
            range(move.first, move.first + move.count)
        )
    for bucket, layout in enumerate(new.layouts):
        for shard, (first, count) in enumerate(layout.spans):
            expected = Counter(range(first, first + count))
            assert got.pop((bucket, False, after[shard]), Counter()) == expected
            standby = new.standby(shard)
            if standby is not None:
                assert standby != after[shard]
                assert got.pop((bucket, True, standby), Counter()) == expected
    assert not got, "somebody gets what is not for him"


@given(members=st.integers(1, 9), standbys=st.integers(0, 1))
def test_everybody_follows_one_other_rank_if_there_are_three(members: int, standbys: int) -> None:
    places = [standby_of(shard, members, standbys) for shard in range(members)]
    if standbys and members >= 3:
        assert sorted(place for place in places if place is not None) == list(range(members))
        assert all(place != shard for shard, place in enumerate(places))
    else:
        assert places == [None] * members


@given(before=members, data=st.data())
def test_shard_is_orphaned_only_with_its_owner_and_its_standby(before: tuple[int, ...], data: st.DataObject) -> None:
    there = data.draw(st.sets(st.sampled_from(before)))
    found = orphans(Partition(before, [], 1), there)
    for shard, owner in enumerate(before):
        standby = Partition(before, [], 1).standby(shard)
        assert (shard in found) == (owner not in there and (standby is None or standby not in there))


@given(
    counts=st.lists(st.integers(1, 500), min_size=1, max_size=9),
    owners=st.integers(1, 9),
    whole=st.booleans(),
    first_owner=st.integers(0, 8),
    item_bytes=st.sampled_from([2, 4]),
)
def test_new_cut_covers_every_element_once_and_keeps_parameters_whole(
    counts: list[int], owners: int, whole: bool, first_owner: int, item_bytes: int
) -> None:
    for layout in plan(counts, item_bytes, 1000.0, 3, whole=whole):
        again = repartition(layout, item_bytes, owners, whole=whole, first_owner=first_owner % owners)
        assert again.slots == layout.slots and again.elements == layout.elements
        assert len(again.spans) == owners
        covered = sorted((first, count) for first, count in again.spans if count)
        end = 0
        for first, count in covered:
            assert first == end
            end += count
        assert end == layout.elements
        pieces = [piece for owner in range(owners) for piece in again.pieces(owner)]
        assert Counter({slot.parameter: slot.count for slot in layout.slots}) == sum(
            (Counter({piece.parameter: piece.count}) for piece in pieces), Counter()
        )
        if whole:
            assert len(pieces) == len(layout.slots), "a parameter was cut"

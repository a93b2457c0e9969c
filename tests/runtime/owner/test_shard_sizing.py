"""Shard sizing: all ranks compute the same shares from the same speeds, and when a rank requests other shares."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stormtorch import BoundedDrift
from stormtorch.runtime.memory.layout import SHARE_UNITS, plan, repartition
from stormtorch.runtime.owner.shard_sizing import (
    LEAST_STEPS,
    ShardSizing,
    Speed,
    SpeedMeter,
    indices_by_machine,
    parse_speed,
    rounded,
)

pytestmark = pytest.mark.pure

FAST, THIN = Speed(1e6, 1e6), Speed(1e5, 1e6)
ALONE = [[0], [1], [2], [3]]


def shares(shards: Any = "rate", standbys: int = 0) -> ShardSizing:
    return ShardSizing(BoundedDrift(shards=shards), 1e6, standbys, 4, lambda rank: rank)


@given(
    counts=st.lists(st.integers(1, 400), min_size=1, max_size=6),
    weights=st.lists(st.floats(0.0, 10.0), min_size=2, max_size=5).filter(lambda each: sum(each) > 0.1),
    whole=st.booleans(),
    first_owner=st.integers(0, 4),
)
def test_shards_of_any_shares_cover_every_element_once(
    counts: list[int], weights: list[float], whole: bool, first_owner: int
) -> None:
    owners, parts = len(weights), rounded(weights)
    assert parts is None or (sum(parts) == SHARE_UNITS and min(parts) >= 0)
    for layout in plan(counts, 4, 1e9, owners, whole=whole):
        cut = repartition(layout, 4, owners, whole=whole, first_owner=first_owner % owners, parts=parts)
        ends = sorted((first, first + count) for first, count in cut.spans if count)
        assert [end for _, end in ends[:-1]] == [begin for begin, _ in ends[1:]]
        assert ends[0][0] == 0 and ends[-1][1] == cut.elements
        borders = {slot.first for slot in cut.slots} | {cut.elements}
        for place, (first, count) in enumerate(cut.spans):
            if whole and count:
                assert first in borders and first + count in borders
            if not whole and parts is not None:
                assert abs(count - cut.elements * parts[place] / SHARE_UNITS) <= 32
                assert count == 0 or parts[place] > 0 or first + count == cut.elements


def test_all_ranks_cut_alike_and_small_gains_change_nothing() -> None:
    speeds_by_rank = {0: FAST, 1: THIN, 2: FAST, 3: FAST}
    thin = shares().decide((0, 1, 2, 3), speeds_by_rank, {}, ALONE)
    assert (
        thin is not None
        and thin[1] < 0.2 * SHARE_UNITS / 4
        and thin == shares().decide((0, 1, 2, 3), speeds_by_rank, {}, ALONE)
    )
    kept = {rank: part / SHARE_UNITS for rank, part in enumerate(thin)}
    slightly = {**speeds_by_rank, 1: Speed(1.05e5, 1e6), 2: Speed(0.97e6, 1e6)}
    assert shares().decide((0, 1, 2, 3), slightly, kept, ALONE) == thin
    assert shares().decide((0, 1, 2, 3), dict.fromkeys(range(4), FAST), kept, ALONE) is None
    both_ways = {**speeds_by_rank, 1: Speed(1e5, 1e5)}
    assert shares().decide((0, 1, 2, 3), both_ways, {}, ALONE) is None


def test_a_gain_too_small_to_ask_for_is_taken_in_a_view_that_begins_anyway() -> None:
    speeds = [FAST, Speed(7e5, 1e6), FAST, FAST]  # shares by these make steps 1.09 times shorter
    own = shares()
    assert not any(own.pays(speeds, None, ALONE, step, 0) for step in range(100))
    found = shares().decide((0, 1, 2, 3), dict(enumerate(speeds)), {}, ALONE)
    assert found is not None and found[1] < found[0]


def test_newcomers_count_as_usual_ones_and_the_unknown_stays_equal() -> None:
    assert shares().decide((0, 1, 2, 3), dict.fromkeys(range(4), Speed()), {}, ALONE) is None
    found = shares().decide((0, 1, 2, 3), {0: FAST, 1: THIN, 2: FAST, 3: Speed()}, {}, ALONE)
    assert found is not None and found[3] > 4 * found[1]


def test_weights_follow_ranks_through_views() -> None:
    weighed = shares((1.0, 2.0, 0.0, 1.0))
    assert weighed.at_start((0, 1, 2, 3)) == (1024, 2048, 0, 1024)
    assert weighed.at_start((1, 2, 3)) == (2731, 0, 1365)
    assert weighed.at_start((0, 3)) is None and weighed.at_start((2,)) is None
    assert weighed.at_start((0, 4)) is None  # a rank that joins later has the mean weight


def test_ranks_of_one_machine_share_its_line() -> None:
    machines = indices_by_machine((0, 1, 2, 3), {0: "a", 1: "b", 2: "a", 3: "b"}, hierarchy=True)
    assert machines == [[0, 2], [1, 3]]
    assert indices_by_machine((0, 1, 2, 3), {0: "a", 1: "b", 2: "a", 3: "b"}, hierarchy=False) == ALONE
    assert indices_by_machine((0, 1, 2), {0: "a", 1: "b", 2: "a"}, hierarchy=True) == ALONE[:3]
    assert indices_by_machine((0, 1), {0: "a"}, hierarchy=True) == ALONE[:2]
    six = [[0, 3], [1, 4], [2, 5]]
    found = shares().decide(range(6), {rank: THIN if rank in (1, 4) else FAST for rank in range(6)}, {}, six)
    assert found is not None and abs(found[1] - found[4]) <= 1 and found[1] < 0.3 * found[0]


def test_a_rank_asks_once_per_view_after_a_while_and_less_often_if_rates_keep_changing() -> None:
    own, speeds = shares(), [FAST, THIN, FAST, FAST]

    def asked(view: int, until: int) -> list[int]:
        return [step for step in range(view, until) if own.pays(speeds, None, ALONE, step, view)]

    first = asked(0, 100)
    assert len(first) == 1 and LEAST_STEPS < first[0] <= LEAST_STEPS + 8
    second = asked(first[0], 200)
    third = asked(second[0], 400)
    assert third[0] - second[0] > second[0] - first[0]
    assert not any(own.pays([FAST] * 4, None, ALONE, step, 500) for step in range(500, 1000))
    assert not any(own.pays([FAST, Speed(), FAST, FAST], None, ALONE, step, 500) for step in range(500, 1000))


def test_what_makes_no_sense_is_unknown() -> None:
    assert parse_speed([1.0, 2.0, 0.5]) == Speed(1.0, 2.0, 0.5)
    for wrong in (None, [], [1.0], [math.nan, 1.0, 0.0], [1.0, math.inf, 0.0], [-1.0, 1.0, 0.0]):
        assert not parse_speed(wrong).known


def test_one_burst_is_no_speed() -> None:
    peaks = iter([(0.0, 0.0, 0.0), (10.0, 20.0, 30.0), (0.0, 21.0, 29.0), (99.0, 19.0, 30.0), (11.0, 0.0, 0.0)])
    meter = SpeedMeter(lambda: next(peaks))
    assert [meter.read() for _ in range(5)][-1] == Speed(11.0, 20.0)
    assert not SpeedMeter(lambda: (0.0, 0.0, 0.0)).read().known

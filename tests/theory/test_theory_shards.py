"""Shares with the shortest step, against an exhaustive search on a grid."""

import itertools
import math
import random

import pytest

from stormtorch.theory.shards import HostSpeed, ShardTimes

pytestmark = pytest.mark.pure


def one_of(ranks: int, other: HostSpeed, followers: float = 0.0) -> ShardTimes:
    return ShardTimes([other, *[HostSpeed(1.0, 1.0, 2.0)] * (ranks - 1)], 1.0, followers)


def gain(times: ShardTimes) -> float:
    ranks = len(times.speeds)
    return times.step_s([1 / ranks] * ranks) / times.step_s(times.best())


def test_no_shares_on_a_grid_are_better_than_the_best() -> None:
    draw = random.Random(7)
    for _ in range(40):
        ranks, grid = draw.choice([(2, 200), (3, 100)])
        speeds = []
        for _ in range(ranks):
            up, down = 10 ** draw.uniform(-1, 1), 10 ** draw.uniform(-1, 1)
            both = draw.choice([math.inf, draw.uniform(max(up, down), up + down)])
            speeds.append(HostSpeed(up, down, both, draw.choice([0.0, draw.uniform(0.0, 5.0)])))
        times = ShardTimes(speeds, 1.0, draw.choice([0.0, 1.0]))
        best = times.best()
        assert sum(best) == pytest.approx(1.0) and min(best) >= 0.0
        cuts = (each for each in itertools.product(range(grid + 1), repeat=ranks - 1) if sum(each) <= grid)
        least_s = min(times.step_s([*(cut / grid for cut in each), 1 - sum(each) / grid]) for each in cuts)
        assert times.step_s(best) <= 1.002 * least_s


@pytest.mark.parametrize("ranks", [2, 4, 10])
def test_a_line_thin_both_ways_alike_is_best_used_by_an_equal_share(ranks: int) -> None:
    times = one_of(ranks, HostSpeed(0.1, 0.1, 0.2))
    assert times.best() == pytest.approx([1 / ranks] * ranks, abs=2e-3)
    assert gain(one_of(ranks, HostSpeed(0.1, 0.1, 0.2), followers=1.0)) < 1.01
    nothing = [0.0, *[1 / (ranks - 1)] * (ranks - 1)]
    # Its link then carries data in one direction only, in each stage.
    assert times.step_s(nothing) / times.step_s([1 / ranks] * ranks) == pytest.approx(ranks / (ranks - 1))


@pytest.mark.parametrize(("up", "down"), [(0.1, 1.0), (1.0, 0.1)])
@pytest.mark.parametrize(("ranks", "expected"), [(4, 1.41), (8, 1.61), (10, 1.65)])
def test_a_line_thin_one_way_makes_its_rank_own_less(up: float, down: float, ranks: int, expected: float) -> None:
    times = one_of(ranks, HostSpeed(up, down, up + down))
    assert gain(times) == pytest.approx(expected, abs=0.01)
    assert times.best()[0] < 0.2 / ranks


def test_a_thin_shared_medium_owns_nothing() -> None:
    times = one_of(8, HostSpeed(0.1, 0.1, 0.1))
    assert times.best()[0] < 0.002
    assert gain(times) == pytest.approx(1.75, abs=0.01)


def test_a_slow_processor_owns_less_and_equal_ones_the_same() -> None:
    slow = ShardTimes([HostSpeed(step_s=10.0), *[HostSpeed(step_s=1.0)] * 3], 1.0)
    assert slow.best() == pytest.approx([0.1 / 3.1, *[1 / 3.1] * 3], rel=0.05)
    assert ShardTimes([HostSpeed(step_s=1.0)] * 5, 1.0).best() == pytest.approx([0.2] * 5, abs=1e-3)
    assert ShardTimes([HostSpeed()] * 3, 1.0).best() == [1 / 3] * 3


def test_wrong_arguments_are_named() -> None:
    for wrong in ({"up": 0.0}, {"down": -1.0}, {"both": math.nan}, {"step_s": math.inf}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            HostSpeed(**wrong)
    with pytest.raises(ValueError, match="size_bytes"):
        ShardTimes([HostSpeed()], 0.0)
    with pytest.raises(ValueError, match="speeds"):
        ShardTimes([], 1.0)
    with pytest.raises(ValueError, match="shares"):
        ShardTimes([HostSpeed()] * 2, 1.0).step_s([1.0])

"""Formulas about deadlines, compared with a simulation of ranks that contribute gradients when they have them."""

import random
from statistics import mean, variance

import pytest

from stormtorch.checks import BadSetting
from stormtorch.theory import best_deadline, deadline_cost, lateness_inflation, step_seconds, steps_covered

pytestmark = pytest.mark.pure


def ranks(*usual: float, jitter: float = 0.02, rounds: int = 16) -> list[list[float]]:
    source = random.Random(0)
    return [[each * (1.0 + jitter * source.random()) for _ in range(rounds)] for each in usual]


def test_deadline_leaves_out_one_rank_that_is_three_times_slower() -> None:
    times = ranks(*[1.0] * 7, 3.0)
    assert 1.0 < best_deadline(times, 0.1) < 1.03


def test_deadline_waits_for_a_rank_that_is_hardly_slower() -> None:
    assert best_deadline(ranks(*[1.0] * 7, 1.05)) >= 1.05


def test_deadline_waits_where_no_deadline_saves_anything() -> None:
    times = ranks(*[1.0] * 7, 1.5)
    assert best_deadline(times, 0.0) < 1.1
    assert best_deadline(times, 10.0) >= 1.5


def test_deadline_waits_for_half_of_the_ranks_at_least() -> None:
    times = ranks(1.0, 1.0, 1.0, 5.0, 5.0, 5.0, 5.0, 5.0)
    assert best_deadline(times) >= 5.0


def test_rank_that_is_late_once_is_left_out_once() -> None:
    times = ranks(*[1.0] * 8)
    times[3][5] = 20.0
    found = best_deadline(times)
    assert found < 2.0
    assert step_seconds(times, found) == pytest.approx(1.02, abs=0.1)


def test_inflation_is_that_of_a_simulated_mean() -> None:
    """Eight ranks with gradients of variance 1, one of which contributes in every third step, with weight 3."""
    times = [[1.0]] * 7 + [[3.0]]
    source = random.Random(1)
    means = [
        (sum(source.gauss(0.0, 1.0) for _ in range(7)) + (3.0 * source.gauss(0.0, 1.0) if step % 3 == 0 else 0.0)) / 8
        for step in range(30_000)
    ]
    assert variance(means) * 8 == pytest.approx(lateness_inflation(times, 1.0), rel=0.03)
    assert mean(means) == pytest.approx(0.0, abs=0.01)


def test_cost_is_time_per_progress() -> None:
    times = [[1.0]] * 7 + [[3.0]]
    assert deadline_cost(times, 1.0) == pytest.approx(1.25)
    assert deadline_cost(times, 3.0) == pytest.approx(3.0)
    assert steps_covered(1.0, 1.0, 1.0) == 1
    assert steps_covered(2.1, 1.0, 1.0) == 3


@pytest.mark.parametrize("times", [[], [[]], [[1.0], [1.0, 2.0]]])
def test_times_must_be_there_for_each_rank(times: list[list[float]]) -> None:
    with pytest.raises(BadSetting, match="times"):
        best_deadline(times)

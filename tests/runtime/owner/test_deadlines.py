"""Deadlines for stragglers, learned from the ranks' times, and unbiased inverse-probability weights."""

import math
import random
from statistics import mean, stdev

import pytest

from stormtorch.runtime.owner.deadlines import Deadlines, InverseProbabilityWeights

pytestmark = pytest.mark.pure


def weighed(chance: float, steps: int, seed: int) -> list[float]:
    """Weight of a rank in each step, 0 where it is late. Its probability to be on time is the same in every step."""
    source, inverse_probability = random.Random(seed), InverseProbabilityWeights(1)
    return [inverse_probability.weight(0, step) if source.random() < chance else 0.0 for step in range(steps)]


@pytest.mark.parametrize("chance", [0.2, 0.35, 0.6, 0.9])
def test_weights_are_unbiased_whatever_the_chance(chance: float) -> None:
    """Tests the mean of 300 trainings without their first steps, in which a rank that begins late has no weight."""
    sums = [mean(weighed(chance, 600, seed)[100:]) for seed in range(300)]
    error = stdev(sums) / math.sqrt(len(sums))
    assert error < 0.004
    assert abs(mean(sums) - 1.0) < 3.5 * error


def test_inverse_of_a_measured_chance_would_be_biased() -> None:
    """The same test finds the bias of the usual estimator, so it can fail."""

    def usual(seed: int) -> float:
        source, given = random.Random(seed), 1.0
        total = 0.0
        for step in range(600):
            here = source.random() < 0.35
            total += (min(step, 32) + 2.0) / given if here else 0.0
            given += here - given / 32 if step > 32 else here
        return total / 600

    sums = [usual(seed) for seed in range(400)]
    assert abs(mean(sums) - 1.0) > 5.0 * stdev(sums) / math.sqrt(len(sums))


def test_rank_that_comes_in_every_third_step_weighs_three() -> None:
    inverse_probability = InverseProbabilityWeights(2)
    weights = [inverse_probability.weight(0, step) for step in range(2, 300, 3)]
    assert set(weights) == {3.0}
    assert inverse_probability.chance(0) == pytest.approx(1 / 3)
    assert inverse_probability.chance(1) == 1.0
    assert inverse_probability.bias == 0.0


def test_asking_twice_in_a_step_changes_nothing() -> None:
    inverse_probability = InverseProbabilityWeights(1)
    assert inverse_probability.weight(0, 3) == inverse_probability.weight(0, 3) == 4.0
    assert inverse_probability.weight(0, 4) == 2.5


def test_bias_of_the_largest_weight_is_told() -> None:
    inverse_probability = InverseProbabilityWeights(1, most=4.0)
    assert [inverse_probability.weight(0, step) for step in (7, 15)] == [4.0, 4.0]
    assert inverse_probability.bias == pytest.approx(0.5)


def test_deadline_is_known_after_three_rounds_and_follows_the_ranks() -> None:
    deadlines = Deadlines(8)
    slow = {**dict.fromkeys(range(7), 1.0), 7: 3.0}
    for _ in range(2):
        deadlines.learn(slow)
        assert deadlines.deadline_s is None
    deadlines.learn(slow)
    assert deadlines.deadline_s == pytest.approx(1.05)
    assert deadlines.usual_s(7) == 3.0
    for _ in range(40):
        deadlines.learn(dict.fromkeys(range(8), 2.0))
    assert deadlines.deadline_s == pytest.approx(2.1)


def test_deadline_counts_what_it_cannot_save() -> None:
    deadlines = Deadlines(4)
    deadlines.record_overhead(30.0)
    deadlines.record_overhead(20.0)
    for _ in range(3):
        deadlines.learn({0: 1.0, 1: 1.0, 2: 1.0, 3: 1.5})
    assert deadlines.deadline_s is not None
    assert deadlines.deadline_s > 1.5

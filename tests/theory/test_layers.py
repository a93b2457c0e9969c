"""Formulas about layers reached at a deadline, compared with sampled backwards and with exhaustive search."""

import itertools
import math
import random
from statistics import mean

import pytest

from stormtorch.checks import BadSetting
from stormtorch.theory import (
    Backward,
    Descent,
    best_deadlines,
    deadlines_bound,
    layer_probabilities,
    layers_inflation,
    layers_missed,
    least_deadline,
)

pytestmark = pytest.mark.pure

UNEQUAL = Backward(layers=3, layer_s=(0.4, 1.0, 1.0, 3.0))
EQUAL = Backward(layers=3, layer_s=(1.0,) * 6)


def drawn(backward: Backward, deadline_s: float, rounds: int, seed: int) -> list[list[int]]:
    """How many ranks reach each layer, round by round, by adding up the times of layers."""
    source = random.Random(seed)
    found = []
    for _ in range(rounds):
        counts = [0] * backward.layers
        for layer_s in backward.layer_s:
            now = 0.0
            for layer in range(backward.layers):
                now += source.expovariate(1.0 / layer_s)
                counts[layer] += now <= deadline_s
        found.append(counts)
    return found


@pytest.mark.parametrize("deadline_s", [0.5, 1.3])
@pytest.mark.parametrize("backward", [UNEQUAL, EQUAL], ids=["unequal", "equal"])
def test_layers_are_missed_as_often_as_in_drawn_backwards(backward: Backward, deadline_s: float) -> None:
    rounds = 20_000
    counts = drawn(backward, deadline_s, rounds, seed=1)
    for layer, chance in enumerate(layers_missed(backward, deadline_s)):
        share = mean(each[layer] == 0 for each in counts)
        assert abs(share - chance) < 4.0 * math.sqrt(chance * (1.0 - chance) / rounds) + 1e-9


@pytest.mark.parametrize("backward", [UNEQUAL, EQUAL], ids=["unequal", "equal"])
def test_inflation_is_that_of_a_drawn_mean_and_the_mean_has_no_bias(backward: Backward) -> None:
    """Gradients are 2 with a variance of 1: beside the noise, being there or not adds to the second moment."""
    deadline_s, rounds, n = 1.3, 40_000, len(backward.layer_s)
    source = random.Random(2)
    counts = drawn(backward, deadline_s, rounds, seed=3)
    wanted = zip(layers_missed(backward, deadline_s), layers_inflation(backward, deadline_s), strict=True)
    for layer, (missed, inflation) in enumerate(wanted):
        there = [each[layer] for each in counts]
        moved = [(2.0 + source.gauss(0.0, 1.0 / math.sqrt(k))) / (1.0 - missed) if k else 0.0 for k in there]
        assert mean(moved) == pytest.approx(2.0, rel=0.03)
        second = 4.0 / (1.0 - missed) + inflation / n
        assert mean(each * each for each in moved) == pytest.approx(second, rel=0.04)


def test_equal_ranks_are_a_case_of_unequal_ones() -> None:
    nearly = Backward(layers=3, layer_s=(1.0 + 1e-13,) + (1.0,) * 5)
    for formula in (layers_missed, layers_inflation):
        assert formula(EQUAL, 0.8) == pytest.approx(formula(nearly, 0.8), rel=1e-9)


def test_chances_are_those_of_a_poisson_number_also_where_they_are_tiny() -> None:
    found = layer_probabilities(4, 1e-6, 1.0)
    assert found == pytest.approx([1e-6**k / math.factorial(k) for k in (1, 2, 3, 4)], rel=1e-5)
    assert layer_probabilities(2, 0.0, 1.0) == [0.0, 0.0]
    assert layer_probabilities(2, 1.0, 1.0) == pytest.approx([1 - math.exp(-1.0), 1 - 2.0 * math.exp(-1.0)])
    assert layer_probabilities(2, 1e3, 1.0) == [1.0, 1.0]


def test_with_all_the_time_nothing_is_missed_or_inflated() -> None:
    assert layers_missed(UNEQUAL, 1e4) == [0.0] * 3
    assert layers_inflation(UNEQUAL, 1e4) == pytest.approx([1.0] * 3)
    assert layers_inflation(UNEQUAL, 0.0) == [math.inf] * 3


def test_the_least_deadline_has_the_chance_that_was_asked_for() -> None:
    assert layers_missed(UNEQUAL, least_deadline(UNEQUAL))[-1] == pytest.approx(0.9)
    assert layers_missed(UNEQUAL, least_deadline(UNEQUAL, 0.2))[-1] == pytest.approx(0.2)


def test_the_bound_without_late_ranks_is_that_of_plain_descent() -> None:
    descent = Descent(contraction=0.1, curvature=0.2, floor=0.05)
    shrink, steps = 1.0 - 0.1 * 0.8, 30
    plain = shrink**steps + 0.05 * (1.0 - shrink**steps)
    assert deadlines_bound(UNEQUAL, descent, [1e4] * steps) == pytest.approx(plain)


def test_the_bound_holds_in_drawn_descents_on_a_parabola() -> None:
    """A parabola has the smoothness of its convexity, so that the bound is met exactly, where layers are one number."""
    backward, rate, spread = Backward(layers=1, layer_s=(1.0,) * 3), 0.2, 0.7
    start, deadlines = 3.0, [0.3, 0.5, 1.0, 2.0, 0.4, 0.8]
    curvature, contraction = rate / 2.0, 2.0 * rate
    noise = rate**2 * spread**2 / (2.0 * 3) / (start**2 / 2.0)
    descent = Descent(contraction=contraction, curvature=curvature, floor=noise / (contraction * (1.0 - curvature)))
    source, ends = random.Random(5), []
    for _ in range(40_000):
        x = start
        for deadline_s in deadlines:
            k = sum(source.expovariate(1.0) <= deadline_s for _ in range(3))
            if k:
                missed = math.exp(-deadline_s) ** 3
                x -= rate * (x + source.gauss(0.0, spread / math.sqrt(k))) / (1.0 - missed)
        ends.append(x * x / start**2)
    assert mean(ends) == pytest.approx(deadlines_bound(backward, descent, deadlines), rel=0.03)


@pytest.mark.parametrize("rates", [None, (1.0, 0.7, 0.3)], ids=["constant", "falling"])
@pytest.mark.parametrize("floor", [0.0, 0.1])
@pytest.mark.parametrize("total_s", [3.0, 8.0])
def test_no_division_of_the_time_among_three_steps_is_better(
    total_s: float, floor: float, rates: tuple[float, ...] | None
) -> None:
    descent = Descent(contraction=0.3, floor=floor)
    found = best_deadlines(UNEQUAL, descent, 3, total_s, rates)
    assert sum(found) == pytest.approx(total_s)
    ours = deadlines_bound(UNEQUAL, descent, found, rates)
    least_s = least_deadline(UNEQUAL)
    tried = [least_s + (total_s - 3.0 * least_s) * at / 40 for at in range(41)]
    theirs = min(
        deadlines_bound(UNEQUAL, descent, (one, two, total_s - one - two), rates)
        for one, two in itertools.product(tried, tried)
        if total_s - one - two >= least_s
    )
    assert ours <= theirs * (1.0 + 1e-6)
    assert ours >= theirs * 0.99  # the grid is fine: far below it would be an error of the bound


def test_late_steps_get_more_time_at_a_constant_rate_and_as_much_at_one_that_falls_as_the_inverse() -> None:
    steps = 200
    constant = best_deadlines(EQUAL, Descent(contraction=0.04), steps, 1.5 * steps)
    assert all(one <= other * 1.0001 for one, other in itertools.pairwise(constant))
    assert constant[-1] > 2.0 * constant[0]
    falling = [1.0 / (1.0 + 0.45 * step) for step in range(steps)]
    plan = best_deadlines(EQUAL, Descent(contraction=0.9, curvature=0.0), steps, 1.5 * steps, falling)
    assert max(plan[50:]) < 1.03 * min(plan[50:])


def test_time_that_nobody_needs_is_divided_equally() -> None:
    assert best_deadlines(EQUAL, Descent(contraction=0.1), 20, 20 * 500.0) == pytest.approx([500.0] * 20)


def test_a_long_training_has_the_plan_of_a_shorter_one_stretched() -> None:
    short = best_deadlines(EQUAL, Descent(contraction=0.02), 400, 600.0)
    long = best_deadlines(EQUAL, Descent(contraction=0.005), 1600, 2400.0)
    assert sum(long) == pytest.approx(2400.0)
    assert long[2::4] == pytest.approx(short, rel=0.02)


def test_wrong_arguments_are_refused_by_name() -> None:
    descent = Descent(contraction=0.1)
    with pytest.raises(BadSetting, match="total_s must be finite and at least"):
        best_deadlines(EQUAL, descent, 10, 10 * 0.9 * least_deadline(EQUAL))
    with pytest.raises(BadSetting, match="rates"):
        best_deadlines(EQUAL, descent, 10, 50.0, [1.0] * 9)
    with pytest.raises(BadSetting, match="layer_s"):
        Backward(layers=2, layer_s=())
    with pytest.raises(BadSetting, match="layers"):
        Backward(layers=0, layer_s=(1.0,))
    with pytest.raises(BadSetting, match="contraction"):
        Descent(contraction=0.0)

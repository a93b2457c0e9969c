"""Every formula against a simulation that knows nothing of it: coins, random walks, matrices; seeds are fixed."""

import math
from collections.abc import Callable
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stormtorch import theory
from stormtorch.theory import KINDS, Kind, Prediction, predict

pytestmark = pytest.mark.pure

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
losses = st.floats(0.0, 0.95)
ranks = st.integers(1, 300)
bounds = st.one_of(st.none(), st.integers(1, 40))
relaxed = settings(deadline=None)  # a busy machine is no failure


def agrees(samples: Floats, value: float, errors: float = 4.0) -> None:
    """The mean of independent samples is `value`, within so many standard errors."""
    standard = float(samples.std()) / math.sqrt(samples.size)
    assert abs(float(samples.mean()) - value) <= errors * standard, (float(samples.mean()), value, standard)


class Walk:
    """Two replicas of many parameters whose updates are independent; an owner broadcasts, and coins lose."""

    def __init__(self, p: float, *, mean: float = 0.0, max_lag: int | None = None, lead: float = 0.0) -> None:
        random, count = np.random.default_rng(5), 80_000
        theta = np.zeros(count)
        copies = np.zeros((2, count))
        self.ages = np.zeros((2, count), dtype=np.int64)
        self.fetched = np.zeros((2, count), dtype=bool)
        for _ in range(40):
            update = mean + random.standard_normal(count, dtype=np.float32)
            theta = theta + update
            self.fetched = np.zeros_like(self.fetched) if max_lag is None else self.ages >= max_lag
            arrived = (random.random((2, count), dtype=np.float32) >= p) | self.fetched
            copies = np.where(arrived, theta + lead * update, copies)
            self.ages = np.where(arrived, 0, self.ages + 1)
        self.pair = (copies[0] - copies[1]) ** 2
        self.owner = (copies[0] - theta) ** 2
        self.common = (copies[0] - theta) * (copies[1] - theta)
        self.behind = theta - copies[0]


WALKS = [(0.1, None), (0.4, None), (0.4, 1), (0.4, 3)]


@pytest.mark.parametrize(("p", "max_lag"), WALKS)
def test_lags_and_drift_are_those_of_a_walk(p: float, max_lag: int | None) -> None:
    walk = Walk(p, max_lag=max_lag)
    for lag in range(5):
        agrees((walk.ages[0] == lag).astype(float), theory.lag_chance(lag, p, max_lag))
    agrees(walk.ages[0].astype(float), theory.mean_lag(p, max_lag))
    agrees((walk.ages[0] - theory.mean_lag(p, max_lag)) ** 2, theory.lag_variance(p, max_lag))
    agrees(walk.fetched[0].astype(float), theory.fetched(p, max_lag))
    agrees(walk.pair, theory.pair_drift(p, max_lag=max_lag))
    agrees(walk.owner, theory.owner_drift(p, max_lag=max_lag))
    agrees(walk.common, theory.common_drift(p, max_lag=max_lag))
    if max_lag is None:
        with pytest.raises(AssertionError):  # the published form is told from the exact one
            agrees(walk.pair, theory.pair_drift_published(p))


@pytest.mark.parametrize(("p", "max_lag"), WALKS)
def test_a_mean_adds_what_the_spread_of_lags_makes_of_it(p: float, max_lag: int | None) -> None:
    walk = Walk(p, mean=1.5, max_lag=max_lag)
    agrees(walk.pair, theory.pair_drift(p, mean_squared=1.5**2, max_lag=max_lag))
    agrees(walk.owner, theory.owner_drift(p, mean_squared=1.5**2, max_lag=max_lag))
    agrees(walk.common, theory.common_drift(p, mean_squared=1.5**2, max_lag=max_lag))
    agrees(walk.behind, 1.5 * theory.mean_lag(p, max_lag))


@pytest.mark.parametrize(("p", "max_lag"), WALKS)
@pytest.mark.parametrize("scale", [0.5, 1.0])
def test_a_lead_takes_the_bias_and_adds_noise(p: float, max_lag: int | None, scale: float) -> None:
    ahead = scale * theory.lead(p, max_lag)
    walk = Walk(p, mean=1.5, max_lag=max_lag, lead=ahead)
    agrees(walk.pair, theory.pair_drift(p, mean_squared=1.5**2, max_lag=max_lag, lead=ahead))
    agrees(walk.owner, theory.owner_drift(p, mean_squared=1.5**2, max_lag=max_lag, lead=ahead))
    agrees(walk.common, theory.common_drift(p, mean_squared=1.5**2, max_lag=max_lag, lead=ahead))
    agrees(walk.behind, 1.5 * (1.0 - scale) * theory.lead(p, max_lag))


def test_a_lead_of_independent_updates_is_noise_alone() -> None:
    walk = Walk(0.3, lead=0.8)
    agrees(walk.pair, theory.pair_drift(0.3, lead=0.8))
    agrees(walk.owner, theory.owner_drift(0.3, lead=0.8))


@pytest.mark.parametrize(
    ("p", "copies", "steps"), [(0.1, 50, 200), (0.4, 30, 300), (0.4, 1, 20), (0.8, 1, 10), (0.9, 3, 100)]
)
@pytest.mark.parametrize("max_lag", [None, 4])
def test_the_largest_lag_is_that_of_coins(p: float, copies: int, steps: int, max_lag: int | None) -> None:
    random = np.random.default_rng(3)
    largest = np.zeros(1500)
    ages = np.zeros((1500, copies), dtype=np.int16)
    for _ in range(steps):
        lost = random.random(ages.shape, dtype=np.float32) < p
        if max_lag is not None:
            lost &= ages < max_lag
        ages = np.where(lost, ages + 1, 0).astype(np.int16)
        largest = np.maximum(largest, ages.max(axis=1))
    if largest.std() == 0.0:
        assert theory.largest_lag(p, copies, steps, max_lag) == pytest.approx(max_lag, abs=1e-3)
    else:
        agrees(largest, theory.largest_lag(p, copies, steps, max_lag))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_the_largest_lag_of_very_many_copies_is_that_of_extreme_values(p: float) -> None:
    # Chances of runs beyond a double's precision: the mean of a Gumbel distribution, less half a step for whole steps.
    copies, steps = 10**9, 10**9
    limit = (math.log(copies * steps * (1.0 - p)) + 0.5772156649) / math.log(1.0 / p) - 0.5
    assert theory.largest_lag(p, copies, steps) == pytest.approx(limit, abs=0.1)


@pytest.mark.parametrize(("p", "n"), [(0.1, 4), (0.4, 2), (0.4, 16), (0.8, 5)])
def test_gradients_vary_as_much_as_drawn_ones(p: float, n: int) -> None:
    random, count, g = np.random.default_rng(7), 100_000, 0.7
    gradients = g + random.standard_normal((count, n))
    arrived = random.random((count, n)) >= p
    arrived[:, 0] = True
    counts = arrived.sum(axis=1)
    agrees(1.0 / counts, theory.mean_inverse_count(p, n))
    agrees(n / counts - 1.0, theory.owner_overweight(p, n))
    mean = (gradients * arrived).sum(axis=1) / counts
    agrees(mean, g)
    agrees(n * (mean - g) ** 2, theory.variance_inflation(p, n))
    weights = np.where(np.arange(n) == 0, 1.0 / n, 1.0 / (n * (1.0 - p)))
    reweighted = (gradients * arrived * weights).sum(axis=1)
    agrees(reweighted, g)
    agrees(n * (reweighted - g) ** 2, theory.horvitz_thompson_inflation(p, n, g**2))


def mixings(p: float, n: int, count: int) -> Floats:
    """W of so many rounds of RPS; column i is what rank i has afterwards."""
    random = np.random.default_rng(11)
    owner = np.arange(n) == random.integers(n, size=(count, 1))
    counted = (random.random((count, n)) >= p) | owner
    told = (random.random((count, n)) >= p) | owner
    mean = counted / counted.sum(axis=1, keepdims=True)
    return np.asarray(np.where(told[:, None, :], mean[:, :, None], np.eye(n)))


@pytest.mark.parametrize(("p", "n"), [(0.1, 4), (0.4, 2), (0.4, 8), (0.7, 5)])
def test_models_mix_as_drawn_matrices_do(p: float, n: int) -> None:
    w = mixings(p, n, 40_000)
    a1, a2 = theory.mixing(p, n)
    squared = w @ w.transpose(0, 2, 1)
    sums = w.sum(axis=2)
    averaged = sums[:, :, None] * sums[:, None, :] / n
    for drawn, a in ((squared, a1), (averaged, a2)):
        agrees((np.trace(drawn, axis1=1, axis2=2) - 1.0) / (n - 1), a)
        agrees(drawn[:, 0, 0], a + (1.0 - a) / n)  # the form a I + (1-a) A, element by element
        agrees(drawn[:, 0, 1], (1.0 - a) / n)


def test_mixing_is_what_is_known_of_it() -> None:
    for n, p, a1, a2 in ((16, 0.1, 0.1005, 0.0114), (64, 0.1, 0.1000, 0.0028), (64, 0.4, 0.4002, 0.0076)):
        assert theory.mixing(p, n) == pytest.approx((a1, a2), abs=5e-5)


def test_differences_between_models_shrink_as_the_rate_factor_has_it() -> None:
    # sqrt(a1 - a2) is the factor by which a round shrinks differences, root mean square: models of mean zero show it.
    p, n = 0.3, 6
    w = mixings(p, n, 40_000)
    models = np.random.default_rng(1).standard_normal(n)
    after = models @ w
    apart = ((after - after.mean(axis=1, keepdims=True)) ** 2).sum(axis=1) / ((models - models.mean()) ** 2).sum()
    a1, a2 = theory.mixing(p, n)
    agrees(apart, a1 - a2)
    assert theory.rate_factor(p, n) == pytest.approx(
        (1 + math.sqrt(n * a2)) / (1 - math.sqrt(float(apart.mean()))), 0.02
    )


@pytest.mark.parametrize("n", [2, 16])
def test_noise_limited_training_needs_as_many_more_steps_as_is_said(n: int) -> None:
    # The mean of all steps, each itself a mean of what arrived, estimates g: so does SGD where noise limits it.
    p, steps = 0.3, 40
    longer = round(theory.lead_steps(p, n, steps))
    random = np.random.default_rng(2)
    arrived = random.random((20_000, longer, n), dtype=np.float32) >= p
    arrived[:, :, 0] = True
    errors = random.standard_normal((20_000, longer)) / np.sqrt(arrived.sum(axis=2))
    exact = theory.lead_steps(p, n, steps) / longer
    agrees(errors.mean(axis=1) ** 2 * steps * n, exact)


def test_costs_are_made_of_their_parts() -> None:
    assert theory.plain_steps(0.2, 8, 100) - theory.lead_steps(0.2, 8, 100) == pytest.approx(0.25)
    assert theory.plain_steps(0.2, 8, 100, max_lag=1) - theory.lead_steps(0.2, 8, 100) == pytest.approx(1 / 6)
    assert theory.averaging_steps(0.2, 8, 100) == pytest.approx(100 * theory.rate_factor(0.2, 8) ** 2)
    # So many more steps make up for the worse rate.
    again = round(theory.averaging_steps(0.2, 8, 10_000))
    assert theory.averaging_rate(0.2, 8, again) == pytest.approx(theory.averaging_rate(0.0, 8, 10_000), rel=1e-4)


# --- limits -----------------------------------------------------------------------------------------------------------


@relaxed
@given(ranks, bounds)
def test_without_loss_nothing_happens(n: int, max_lag: int | None) -> None:
    found = predict(n, 0.0, max_lag)
    once = {"up_to_date", "variance_inflation", "horvitz_thompson_inflation", "rate_factor"}
    for name in KINDS:
        if name.endswith("_steps"):
            assert getattr(found, name) == pytest.approx(found.steps)
        elif name != "averaging_rate":
            assert getattr(found, name) == pytest.approx(float(name in once), abs=1e-7), name


@relaxed
@given(losses, losses, ranks, bounds)
def test_more_loss_is_never_better(p: float, other: float, n: int, max_lag: int | None) -> None:
    less, more = (predict(n, each, max_lag) for each in sorted((p, other)))
    for name in KINDS:
        if name in ("up_to_date", "a2"):  # of the second there is less again where hardly any mean comes back
            continue
        assert getattr(more, name) >= getattr(less, name) * (1 - 1e-9) - 1e-9, name


@relaxed
@given(losses, st.floats(0.0, 4.0))
def test_with_the_lead_replicas_are_off_each_for_itself(p: float, mean_squared: float) -> None:
    ahead = theory.lead(p)
    assert theory.common_drift(p, mean_squared=mean_squared, lead=ahead) == pytest.approx(0.0, abs=1e-9 / (1 - p) ** 3)
    apart = theory.pair_drift(p, mean_squared=mean_squared, lead=ahead)
    assert apart == pytest.approx(2.0 * p / (1.0 - p) ** 2 * (1.0 + mean_squared))
    assert theory.common_drift(p) == pytest.approx(p**2 / (1.0 - p**2))


def test_with_the_lead_the_mean_over_replicas_is_right_whatever_the_updates_are() -> None:
    random, count, p = np.random.default_rng(9), 200_000, 0.3
    theta, copies = 0.0, np.zeros(count)
    for step in range(60):
        update = math.sin(step) * step  # nothing like independent
        theta += update
        copies = np.where(random.random(count) < p, copies, theta + theory.lead(p) * update)
    agrees(copies, theta)


@relaxed
@given(losses, bounds)
def test_chances_add_up_and_end_at_the_bound(p: float, max_lag: int | None) -> None:
    lags = range(2000 if max_lag is None else max_lag + 1)
    assert math.fsum(theory.lag_chance(lag, p, max_lag) for lag in lags) == pytest.approx(1.0)
    if max_lag is not None:
        assert theory.lag_chance(max_lag + 1, p, max_lag) == 0.0
        assert theory.largest_lag(p, 10**6, 10**4, max_lag) <= max_lag


@relaxed
@given(st.floats(0.0, 0.8), st.floats(0.0, 4.0), st.floats(0.0, 3.0))
def test_a_far_bound_is_none(p: float, mean_squared: float, lead: float) -> None:
    for drift in (theory.pair_drift, theory.owner_drift):
        unbounded = drift(p, mean_squared=mean_squared, lead=lead)
        assert drift(p, mean_squared=mean_squared, lead=lead, max_lag=400) == pytest.approx(unbounded)


def test_loss_of_almost_everything_is_bounded_by_the_lag() -> None:
    # Every age from 0 to 3 is then as likely as any other.
    almost = 1.0 - 1e-12
    assert theory.mean_lag(almost, 3) == pytest.approx(1.5)
    assert theory.lag_variance(almost, 3) == pytest.approx(1.25)
    assert theory.pair_drift(almost, max_lag=3) == pytest.approx(1.25)


@relaxed
@given(losses)
def test_many_ranks_are_the_limits_of_the_papers(p: float) -> None:
    n = 10**7
    a1, a2 = theory.mixing(p, n)
    assert a1 == pytest.approx(p, abs=1e-6)
    assert n * a2 == pytest.approx(2 * p * (1 - p), abs=1e-3)
    assert theory.rate_factor(p, n) == pytest.approx((1 + math.sqrt(2 * p * (1 - p))) / (1 - math.sqrt(p)), rel=0.05)
    assert theory.variance_inflation(p, n) == pytest.approx(1 / (1 - p))
    assert theory.horvitz_thompson_inflation(p, n) == pytest.approx(1 / (1 - p), rel=1e-5)


@relaxed
@given(losses, st.floats(0.0, 10.0), st.floats(0.0, 20.0), bounds)
def test_no_lead_is_nearer_to_the_owner_than_the_best(
    p: float, mean_squared: float, lead: float, max_lag: int | None
) -> None:
    best = theory.best_lead(p, mean_squared, max_lag)
    least = theory.owner_drift(p, mean_squared=mean_squared, max_lag=max_lag, lead=best)
    assert least <= theory.owner_drift(p, mean_squared=mean_squared, max_lag=max_lag, lead=lead) * (1 + 1e-9)
    assert best <= theory.lead(p, max_lag)


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: theory.pair_drift(1.0), "p"),
        (lambda: theory.pair_drift_published(-0.1), "p"),
        (lambda: theory.owner_drift(math.nan), "p"),
        (lambda: theory.lead(1.5), "p"),
        (lambda: theory.fetched(1.0), "p"),
        (lambda: theory.mixing(1.0, 4), "p"),
        (lambda: theory.owner_drift(0.1, mean_squared=-1.0), "mean_squared"),
        (lambda: theory.pair_drift(0.1, lead=math.inf), "lead"),
        (lambda: theory.pair_drift(0.1, max_lag=0), "max_lag"),
        (lambda: theory.lag_chance(-1, 0.1), "lag"),
        (lambda: theory.mean_inverse_count(0.1, 0), "n"),
        (lambda: theory.horvitz_thompson_inflation(0.1, 4, math.nan), "mean_squared"),
        (lambda: theory.largest_lag(0.1, 0, 10), "copies"),
        (lambda: theory.averaging_rate(0.1, 4, 0), "steps"),
        (lambda: theory.lead_steps(0.1, 4, 0), "steps"),
        (lambda: predict(0, 0.1), "n"),
        (lambda: predict(4, 0.1, chunks=0), "chunks"),
    ],
)
def test_what_has_no_sense_is_named(call: Callable[[], object], name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must"):
        call()


def test_a_prediction_says_of_every_number_what_it_is() -> None:
    found = predict(64, 0.1)
    assert {field.name for field in fields(Prediction)} == set(KINDS) | {"n", "p", "max_lag", "steps", "chunks"}
    assert [name for name, kind in KINDS.items() if kind is Kind.BOUND] == ["rate_factor", "averaging_rate"]
    assert found.lead == pytest.approx(1 / 9)
    assert found.pair_drift == pytest.approx(0.2020, abs=1e-4)
    assert found.pair_drift_published == pytest.approx(0.1818, abs=1e-4)
    assert found.owner_drift_by_mean == pytest.approx(theory.owner_drift(0.1, mean_squared=1.0) - found.owner_drift)
    assert found.pair_drift_by_mean == pytest.approx(theory.pair_drift(0.1, mean_squared=1.0) - found.pair_drift)
    assert found.owner_drift_by_mean_lead == pytest.approx(
        theory.owner_drift(0.1, mean_squared=1.0, lead=found.lead) - found.owner_drift_lead
    )

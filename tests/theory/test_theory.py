"""Every formula against an independent simulation: coins, random walks, matrices; with fixed seeds."""

import math

import numpy as np
import pytest

from stormtorch import theory

pytestmark = pytest.mark.pure

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def agrees(samples: Floats, value: float, errors: float = 4.0) -> None:
    """The mean of independent samples is `value`, within so many standard errors."""
    standard = float(samples.std()) / math.sqrt(samples.size)
    assert abs(float(samples.mean()) - value) <= errors * standard, (float(samples.mean()), value, standard)


class Walk:
    """Two replicas of many parameters; an owner broadcasts, and coins lose. `momentum` is the correlation of an update
    with the next one; without it, updates are independent.
    """

    def __init__(
        self, p: float, *, mean: float = 0.0, max_lag: int | None = None, lead: float = 0.0, momentum: float = 0.0
    ) -> None:
        random, count = np.random.default_rng(5), 80_000
        theta = np.zeros(count)
        noise = random.standard_normal(count)
        copies = np.zeros((2, count))
        self.ages = np.zeros((2, count), dtype=np.int64)
        self.fetched = np.zeros((2, count), dtype=bool)
        for _ in range(40):
            fresh = random.standard_normal(count, dtype=np.float32)
            noise = momentum * noise + math.sqrt(1.0 - momentum**2) * fresh
            update = mean + noise
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
        agrees((walk.ages[0] == lag).astype(float), theory.lag_probability(lag, p, max_lag))
    agrees(walk.ages[0].astype(float), theory.mean_lag(p, max_lag))
    agrees((walk.ages[0] - theory.mean_lag(p, max_lag)) ** 2, theory.lag_variance(p, max_lag))
    agrees(walk.fetched[0].astype(float), theory.fetched(p, max_lag))
    agrees(walk.pair, theory.pair_drift(p, max_lag=max_lag))
    agrees(walk.owner, theory.owner_drift(p, max_lag=max_lag))
    agrees(walk.common, theory.common_drift(p, max_lag=max_lag))
    if max_lag is None:
        with pytest.raises(AssertionError):  # the test distinguishes the published formula from the exact one
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


@pytest.mark.parametrize("p", [0.1, 0.4])
@pytest.mark.parametrize(("mean", "momentum"), [(0.0, 0.0), (2.0, 0.0), (0.0, 0.6), (0.5, 0.9), (0.0, -0.5)])
def test_with_the_full_lead_drift_is_the_bound_whatever_the_updates_are(p: float, mean: float, momentum: float) -> None:
    walk = Walk(p, mean=mean, momentum=momentum, lead=theory.lead(p))
    agrees(walk.pair / (1.0 + mean**2), theory.pair_bound(p, lead=theory.lead(p)))
    assert theory.pair_bound(p, lead=theory.lead(p)) == pytest.approx(2 * p / (1 - p) ** 2)


@pytest.mark.thorough
@pytest.mark.parametrize(("p", "max_lag"), WALKS)
@pytest.mark.parametrize("scale", [0.0, 0.5, 1.0, 2.0])
def test_no_updates_that_go_on_drift_further_than_the_bound(p: float, max_lag: int | None, scale: float) -> None:
    ahead = scale * theory.lead(p, max_lag)
    bound = theory.pair_bound(p, lead=ahead, max_lag=max_lag)
    closest = 0.0
    for mean, momentum in [(0.0, 0.0), (0.0, 0.5), (0.0, 0.9), (1.5, 0.0), (20.0, 0.0)]:
        pair = Walk(p, mean=mean, momentum=momentum, lead=ahead, max_lag=max_lag).pair / (1.0 + mean**2)
        error = float(pair.std()) / math.sqrt(pair.size)
        assert float(pair.mean()) <= bound + 4.0 * error
        closest = max(closest, float(pair.mean()) / bound)
    assert closest > 0.9
    assert theory.pair_bound(p, max_lag=200) == pytest.approx(theory.pair_bound(p))
    assert bound > theory.pair_drift_published(p) or max_lag is not None


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


def test_with_the_lead_the_mean_over_replicas_is_right_whatever_the_updates_are() -> None:
    random, count, p = np.random.default_rng(9), 200_000, 0.3
    theta, copies = 0.0, np.zeros(count)
    for step in range(60):
        update = math.sin(step) * step  # nothing like independent
        theta += update
        copies = np.where(random.random(count) < p, copies, theta + theory.lead(p) * update)
    agrees(copies, theta)

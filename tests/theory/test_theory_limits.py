"""Limits and monotonicity of the formulas, and refused arguments."""

import math
from collections.abc import Callable
from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stormtorch import theory
from stormtorch.theory import KINDS, Kind, Prediction, predict

pytestmark = pytest.mark.pure

losses = st.floats(0.0, 0.95)
ranks = st.integers(1, 300)
bounds = st.one_of(st.none(), st.integers(1, 40))
relaxed = settings(deadline=None)  # a busy machine must not fail the test


def test_rare_lags_are_counted_to_the_last_digit() -> None:
    p = 1e-6  # of two steps: 2p(1-p) for one loss, p^2 for two
    assert theory.largest_lag(p, 1, 2) == pytest.approx(2 * p * (1 - p) + 2 * p**2, rel=1e-9)


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
        if name in ("up_to_date", "a2"):  # a2 falls again when almost no average is received
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


@relaxed
@given(losses, bounds)
def test_chances_add_up_and_end_at_the_bound(p: float, max_lag: int | None) -> None:
    lags = range(2000 if max_lag is None else max_lag + 1)
    assert math.fsum(theory.lag_probability(lag, p, max_lag) for lag in lags) == pytest.approx(1.0)
    if max_lag is not None:
        assert theory.lag_probability(max_lag + 1, p, max_lag) == 0.0
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
        (lambda: theory.lag_probability(-1, 0.1), "lag"),
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

"""Prediction: all formulas of the theory, for one loss and one number of ranks."""

from dataclasses import dataclass
from enum import StrEnum

from stormtorch.theory.arguments import check_count, check_loss, check_max_lag
from stormtorch.theory.averaging import averaging_rate, mixing, rate_factor
from stormtorch.theory.cost import averaging_steps, lead_steps, plain_steps
from stormtorch.theory.drift import common_drift, owner_drift, pair_drift, pair_drift_published
from stormtorch.theory.gradients import horvitz_thompson_inflation, owner_overweight, variance_inflation
from stormtorch.theory.lag import fetched, lag_probability, lag_variance, largest_lag, lead, mean_lag


class Kind(StrEnum):
    """How far a predicted number can be trusted."""

    EXACT = "exact"
    """Exact under the assumptions of the formula; a simulation under them gives the same."""
    PUBLISHED = "published"
    """Stated by a paper; shown for comparison."""
    BOUND = "bound"
    """A bound: the truth may be better, or the number holds up to a constant."""
    APPROXIMATE = "approximate"
    """Rests on a simplification, which the docstring of its function states."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Prediction for a training of n ranks that lose the fraction p. Drift is divided by the variance of one update."""

    n: int
    """Number of ranks."""
    p: float
    """Fraction of lost chunks."""
    max_lag: int | None
    """Age at which a copy is fetched exactly; None fetches none."""
    steps: int
    """Steps without loss, the reference for those under loss."""
    chunks: int
    """Number of chunks of the model."""

    mean_lag: float
    """Mean age of copies, in steps."""
    lag_deviation: float
    """Standard deviation of the age of copies, in steps."""
    up_to_date: float
    """Fraction of the copies that are up to date."""
    largest_lag: float
    """Mean of the largest age over all copies of all ranks and all steps, in steps."""
    fetched: float
    """Fraction of the copies that are fetched exactly in each step because of `max_lag`."""
    lead: float
    """Lead at which replicas are unbiased, in updates."""

    pair_drift: float
    """Drift between two replicas for updates with mean zero."""
    pair_drift_published: float
    """`pair_drift` as Weintraub states it, without `max_lag`."""
    owner_drift: float
    """Drift between a replica and the owner for updates with mean zero."""
    pair_drift_by_mean: float
    """Factor of the squared mean of an update in the drift between two replicas."""
    owner_drift_by_mean: float
    """Factor of the squared mean of an update in the drift between a replica and the owner."""
    pair_drift_lead: float
    """`pair_drift` with the lead."""
    owner_drift_lead: float
    """`owner_drift` with the lead."""
    owner_drift_by_mean_lead: float
    """`owner_drift_by_mean` with the lead."""
    common_drift: float
    """Part of `owner_drift` that remains in a mean over very many replicas."""
    common_drift_lead: float
    """`common_drift` with the lead."""

    variance_inflation: float
    """Variance of the mean of the gradients that arrived, relative to that of all gradients."""
    owner_overweight: float
    """Fraction by which an owner's own gradient is overweighted."""
    horvitz_thompson_inflation: float
    """`variance_inflation` of the estimate that weights all ranks equally, for gradients with mean zero."""
    horvitz_thompson_by_mean: float
    """Factor of the squared mean over the variance of a gradient in that inflation."""

    a1: float
    """Fraction of the differences between models that remains after one round of model averaging."""
    a2: float
    """Disturbance of the mean over the models in one round of model averaging."""
    rate_factor: float
    """Factor by which loss multiplies the convergence rate of model averaging."""
    averaging_rate: float
    """`rate_factor` / sqrt(n steps)."""

    plain_steps: float
    """Steps of bounded drift without a lead for the progress of `steps` without loss."""
    lead_steps: float
    """Steps of bounded drift with the lead for the same progress."""
    averaging_steps: float
    """Steps of model averaging for the same progress."""


_LESS_THAN_EXACT = {
    "pair_drift_published": Kind.PUBLISHED,
    "rate_factor": Kind.BOUND,
    "averaging_rate": Kind.BOUND,
    "plain_steps": Kind.APPROXIMATE,
    "lead_steps": Kind.APPROXIMATE,
    "averaging_steps": Kind.APPROXIMATE,
}
ARGUMENTS = ("n", "p", "max_lag", "steps", "chunks")
"""Fields of a `Prediction` that hold its conditions."""
KINDS = {
    name: _LESS_THAN_EXACT.get(name, Kind.EXACT) for name in Prediction.__dataclass_fields__ if name not in ARGUMENTS
}
"""Kinds of all other fields of a `Prediction`."""


def predict(n: int, p: float, max_lag: int | None = None, *, steps: int = 1000, chunks: int = 10_000) -> Prediction:
    """Evaluate all formulas for n ranks with loss p; a `ValueError` names an invalid argument."""
    check_count("n", n)
    check_loss(p)
    check_max_lag(max_lag)
    check_count("steps", steps)
    check_count("chunks", chunks)
    ahead = lead(p, max_lag)
    variance = lag_variance(p, max_lag)
    a1, a2 = mixing(p, n)
    reweighted = horvitz_thompson_inflation(p, n)
    return Prediction(
        n=n,
        p=p,
        max_lag=max_lag,
        steps=steps,
        chunks=chunks,
        mean_lag=mean_lag(p, max_lag),
        lag_deviation=variance**0.5,
        up_to_date=lag_probability(0, p, max_lag),
        # An owner's chunk has a copy on every other rank.
        largest_lag=largest_lag(p, chunks * (n - 1), steps, max_lag) if n > 1 else 0.0,
        fetched=fetched(p, max_lag),
        lead=ahead,
        pair_drift=pair_drift(p, max_lag=max_lag),
        pair_drift_published=pair_drift_published(p),
        owner_drift=owner_drift(p, max_lag=max_lag),
        pair_drift_by_mean=2.0 * variance,
        owner_drift_by_mean=variance + ahead**2,
        pair_drift_lead=pair_drift(p, max_lag=max_lag, lead=ahead),
        owner_drift_lead=owner_drift(p, max_lag=max_lag, lead=ahead),
        owner_drift_by_mean_lead=variance,
        common_drift=common_drift(p, max_lag=max_lag),
        common_drift_lead=common_drift(p, max_lag=max_lag, lead=ahead),
        variance_inflation=variance_inflation(p, n),
        owner_overweight=owner_overweight(p, n),
        horvitz_thompson_inflation=reweighted,
        horvitz_thompson_by_mean=horvitz_thompson_inflation(p, n, 1.0) - reweighted,
        a1=a1,
        a2=a2,
        rate_factor=rate_factor(p, n),
        averaging_rate=averaging_rate(p, n, steps),
        plain_steps=plain_steps(p, n, steps, max_lag),
        lead_steps=lead_steps(p, n, steps),
        averaging_steps=averaging_steps(p, n, steps),
    )

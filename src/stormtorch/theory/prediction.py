"""All formulas at once, for one loss and one number of ranks."""

from dataclasses import dataclass
from enum import StrEnum

from stormtorch.theory.arguments import check_count, check_loss, check_max_lag
from stormtorch.theory.averaging import averaging_rate, mixing, rate_factor
from stormtorch.theory.cost import averaging_steps, lead_steps, plain_steps
from stormtorch.theory.drift import common_drift, owner_drift, pair_drift, pair_drift_published
from stormtorch.theory.gradients import horvitz_thompson_inflation, owner_overweight, variance_inflation
from stormtorch.theory.lag import fetched, lag_chance, lag_variance, largest_lag, lead, mean_lag


class Kind(StrEnum):
    """How far a number can be believed."""

    EXACT = "exact"
    """Under the assumptions of its formula, and equal to what a simulation of these gives."""
    PUBLISHED = "published"
    """As a paper states it, to compare with."""
    BOUND = "bound"
    """It may be better, or holds up to a constant."""
    APPROXIMATE = "approximate"
    """Rests on a simplification that its function names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What to expect of training with n ranks that lose the fraction p. Drift is over the variance of one update."""

    n: int
    """Ranks."""
    p: float
    """Fraction of the chunks that is lost."""
    max_lag: int | None
    """Age at which a copy is fetched exactly; None is never."""
    steps: int
    """Without loss, to be compared with those under loss."""
    chunks: int
    """Datagrams that the model fills."""

    mean_lag: float
    """Steps."""
    lag_deviation: float
    """Standard deviation, steps."""
    up_to_date: float
    """Fraction of the copies that are not old at all."""
    largest_lag: float
    """Over all copies of all ranks and all steps, on average."""
    fetched: float
    """Fraction of the copies that `max_lag` has fetched exactly, per step."""
    lead: float
    """Updates."""

    pair_drift: float
    """Between two replicas, of updates with mean zero."""
    pair_drift_published: float
    """The same as Weintraub has it, without `max_lag`."""
    owner_drift: float
    """Between a replica and the owner, of updates with mean zero."""
    pair_drift_by_mean: float
    """What a mean adds between two replicas, times its square."""
    owner_drift_by_mean: float
    """What a mean adds between a replica and the owner, times its square."""
    pair_drift_lead: float
    """`pair_drift` with the lead."""
    owner_drift_lead: float
    """`owner_drift` with the lead."""
    owner_drift_by_mean_lead: float
    """`owner_drift_by_mean` with the lead."""
    common_drift: float
    """What is left of `owner_drift` in a mean over very many replicas."""
    common_drift_lead: float
    """`common_drift` with the lead."""

    variance_inflation: float
    """Of the mean of what arrived, over that of all."""
    owner_overweight: float
    """By what fraction an owner's gradient counts too much."""
    horvitz_thompson_inflation: float
    """`variance_inflation` of the estimate that weighs all alike, of gradients with mean zero."""
    horvitz_thompson_by_mean: float
    """What a mean adds to that, times its square over the variance."""

    a1: float
    """Of model averaging: what is left of differences between models."""
    a2: float
    """Of model averaging: by how much the mean over the models is disturbed."""
    rate_factor: float
    """By how much loss multiplies the rate of model averaging."""
    averaging_rate: float
    """That over sqrt(n steps)."""

    plain_steps: float
    """Steps with bounded drift that come as far as `steps`."""
    lead_steps: float
    """The same with the lead."""
    averaging_steps: float
    """The same with model averaging."""


_LESS_THAN_EXACT = {
    "pair_drift_published": Kind.PUBLISHED,
    "rate_factor": Kind.BOUND,
    "averaging_rate": Kind.BOUND,
    "plain_steps": Kind.APPROXIMATE,
    "lead_steps": Kind.APPROXIMATE,
    "averaging_steps": Kind.APPROXIMATE,
}
ASKED = ("n", "p", "max_lag", "steps", "chunks")
"""The fields of a `Prediction` that are its conditions."""
KINDS = {name: _LESS_THAN_EXACT.get(name, Kind.EXACT) for name in Prediction.__dataclass_fields__ if name not in ASKED}
"""Of all other fields of a `Prediction`."""


def predict(n: int, p: float, max_lag: int | None = None, *, steps: int = 1000, chunks: int = 10_000) -> Prediction:
    """What to expect of n ranks that lose the fraction p; a `ValueError` names the argument that has no sense."""
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
        up_to_date=lag_chance(0, p, max_lag),
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

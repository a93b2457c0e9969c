"""How many steps old a replica's copy of a chunk is, and by how much a broadcast must be ahead to make up for it.

A copy is as old as broadcasts of it were lost in a row, so its lag is geometric: `(1-p) p^lag`. With `max_lag`, a copy
of that age is fetched exactly at the next broadcast. Ages are then 0 to `max_lag`, each p times as likely as the one
before it as ever: the same distribution, cut off and scaled.
"""

import math

from stormtorch.theory.arguments import check_count, check_loss, check_max_lag

_NEGLIGIBLE = 1e-18
_RARE = 1e-5


def lag_chance(lag: int, p: float, max_lag: int | None = None) -> float:
    """Chance that a copy is `lag` steps old. Exact; derived here, see above."""
    check_count("lag", lag, least=0)
    check_loss(p)
    check_max_lag(max_lag)
    if max_lag is None:
        return (1.0 - p) * p**lag
    chances = lag_chances(p, max_lag)
    return chances[lag] if lag < len(chances) else 0.0


def mean_lag(p: float, max_lag: int | None = None) -> float:
    """Steps that copies are behind on average: p/(1-p), with a bound less. Exact; derived here, as `lag_chance`."""
    check_loss(p)
    check_max_lag(max_lag)
    if max_lag is None:
        return p / (1.0 - p)
    return sum(lag * chance for lag, chance in enumerate(lag_chances(p, max_lag)))


def lag_variance(p: float, max_lag: int | None = None) -> float:
    """Variance of the lag: p/(1-p)^2, with a bound less. Exact; derived here, as `lag_chance`."""
    check_loss(p)
    check_max_lag(max_lag)
    if max_lag is None:
        return p / (1.0 - p) ** 2
    mean = mean_lag(p, max_lag)
    return sum((lag - mean) ** 2 * chance for lag, chance in enumerate(lag_chances(p, max_lag)))


def largest_lag(p: float, copies: int, steps: int, max_lag: int | None = None) -> float:
    """Mean of the largest lag among so many copies in so many steps, all of them new at the beginning.

    Exact; derived here: it is the mean over all k of the chance that some copy loses k+1 broadcasts in a row. A bound
    changes no such chance for k below it, as nothing is fetched before that age.
    """
    check_loss(p)
    check_count("copies", copies)
    check_count("steps", steps)
    check_max_lag(max_lag)
    total = 0.0
    for run in range(1, 1 + (steps if max_lag is None else min(steps, max_lag))):
        # Runs can begin at the first step and after every arrival. Where so few do, two never meet.
        expected = copies * p**run * (1.0 + (1.0 - p) * (steps - run))
        if expected < _NEGLIGIBLE:
            break
        total += expected if expected < _RARE else -math.expm1(copies * _log_without_run(p, run, steps))
    return total


def _log_without_run(p: float, run: int, steps: int) -> float:
    """Log of the chance that of so many tosses no `run` in a row are heads, which have chance p."""
    # A first such run ends at a toss if tails and `run` heads end there and none had ended before the tails.
    # Logarithms, since what is next to certain for a copy need not be so for a billion of them.
    first = p**run
    before = [0.0] * run + [math.log1p(-first)]
    enough = min(steps, 12 * run + 60)  # from there on, every toss takes the same fraction
    taken = 0.0
    for toss in range(run + 1, enough + 1):
        taken = (1.0 - p) * first * math.exp(before[toss - 1 - run] - before[toss - 1])
        if taken >= 1.0:  # by rounding, where next to nothing is left
            return -math.inf
        before.append(before[-1] + math.log1p(-taken))
    return before[enough] + (steps - enough) * math.log1p(-taken)


def fetched(p: float, max_lag: int | None = None) -> float:
    """Fraction of all copies that are fetched exactly at a step, which is what a bound costs: those of that age.

    Exact; derived here.
    """
    check_loss(p)
    return 0.0 if max_lag is None else lag_chance(max_lag, p, max_lag)


def lead(p: float, max_lag: int | None = None) -> float:
    """By how many updates an owner's broadcast must be ahead so that replicas are right on average: the mean lag.

    Exact; derived here: a copy of age L is L - lead updates behind. Without a bound, replicas are then right on average
    whatever the updates are (see `common_drift`); with one, if updates have a constant mean.
    """
    return mean_lag(p, max_lag)


def lag_chances(p: float, max_lag: int) -> list[float]:
    """Of the lags 0, 1, ... of bounded copies; negligible ones at the end are left out. Arguments are not checked."""
    weights = [1.0]
    # Weights are scaled by their sum, and not by 1 - p^(max_lag+1), which cancels where p is almost 1.
    while len(weights) <= max_lag and weights[-1] > _NEGLIGIBLE:
        weights.append(weights[-1] * p)
    total = math.fsum(weights)
    return [weight / total for weight in weights]

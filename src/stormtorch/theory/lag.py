"""Theory of staleness: the lag (age in steps) of a replica's copy of a chunk, and the lead that compensates for it.

The age of a copy is the number of its broadcasts that were lost in a row, so the lag is geometric: `(1-p) p^lag`. With
`max_lag`, a copy of that age is fetched exactly at the next broadcast. Ages are then 0 to `max_lag`, and each is still
p times as likely as the one before it: the same distribution, truncated and rescaled.
"""

import math

from stormtorch.theory.arguments import check_count, check_loss, check_max_lag

_NEGLIGIBLE = 1e-18
_RARE = 1e-5


def lag_probability(lag: int, p: float, max_lag: int | None = None) -> float:
    """Probability that a copy is `lag` steps old. Exact; derived here, see above."""
    check_count("lag", lag, least=0)
    check_loss(p)
    check_max_lag(max_lag)
    if max_lag is None:
        return (1.0 - p) * p**lag
    chances = lag_probabilities(p, max_lag)
    return chances[lag] if lag < len(chances) else 0.0


def mean_lag(p: float, max_lag: int | None = None) -> float:
    """Mean age of copies in steps: p/(1-p), or less with a bound. Exact; derived here, as `lag_probability`."""
    check_loss(p)
    check_max_lag(max_lag)
    if max_lag is None:
        return p / (1.0 - p)
    return sum(lag * chance for lag, chance in enumerate(lag_probabilities(p, max_lag)))


def lag_variance(p: float, max_lag: int | None = None) -> float:
    """Variance of the lag: p/(1-p)^2, or less with a bound. Exact; derived here, as `lag_probability`."""
    check_loss(p)
    check_max_lag(max_lag)
    if max_lag is None:
        return p / (1.0 - p) ** 2
    mean = mean_lag(p, max_lag)
    return sum((lag - mean) ** 2 * chance for lag, chance in enumerate(lag_probabilities(p, max_lag)))


def largest_lag(p: float, copies: int, steps: int, max_lag: int | None = None) -> float:
    """Mean of the largest lag among `copies` copies in `steps` steps, if all copies are new at the start.

    Exact; derived here: the sum over all k of the probability that some copy loses k+1 broadcasts in a row. A bound
    does not change these probabilities for k below it, as nothing is fetched before that age.
    """
    check_loss(p)
    check_count("copies", copies)
    check_count("steps", steps)
    check_max_lag(max_lag)
    total = 0.0
    for run in range(1, 1 + (steps if max_lag is None else min(steps, max_lag))):
        # Runs can begin at the first step and after every arrival. If they are this rare, two runs never coincide.
        expected = copies * p**run * (1.0 + (1.0 - p) * (steps - run))
        if expected < _NEGLIGIBLE:
            break
        total += expected if expected < _RARE else -math.expm1(copies * _log_without_run(p, run, steps))
    return total


def _log_without_run(p: float, run: int, steps: int) -> float:
    """Logarithm of the probability that `steps` tosses have no `run` heads in a row, with heads of probability p."""
    # The first such run ends at a toss if tails and then `run` heads end there, and no run had ended before the tails.
    # Logarithms, since what is almost certain for one copy need not be so for a billion of them.
    first = p**run
    before = [0.0] * run + [math.log1p(-first)]
    enough = min(steps, 12 * run + 60)  # beyond, every toss reduces the probability by the same fraction
    taken = 0.0
    for toss in range(run + 1, enough + 1):
        taken = (1.0 - p) * first * math.exp(before[toss - 1 - run] - before[toss - 1])
        if taken >= 1.0:  # by rounding, when almost nothing remains
            return -math.inf
        before.append(before[-1] + math.log1p(-taken))
    return before[enough] + (steps - enough) * math.log1p(-taken)


def fetched(p: float, max_lag: int | None = None) -> float:
    """Fraction of all copies that are fetched exactly in a step, the cost of a bound: those of age `max_lag`.

    Exact; derived here.
    """
    check_loss(p)
    return 0.0 if max_lag is None else lag_probability(max_lag, p, max_lag)


def lead(p: float, max_lag: int | None = None) -> float:
    """Number of updates by which a broadcast must lead to make replicas unbiased: the mean lag.

    Exact; derived here: a copy of age L is L - lead updates behind. Without a bound, replicas are then unbiased for
    any updates (see `common_drift`); with a bound, if updates have a constant mean.
    """
    return mean_lag(p, max_lag)


def lag_probabilities(p: float, max_lag: int) -> list[float]:
    """Probabilities of the lags 0, 1, ... of bounded copies, without negligible ones. Arguments are not checked."""
    weights = [1.0]
    # Weights are divided by their sum, not by 1 - p^(max_lag+1), which loses its digits if p is almost 1.
    while len(weights) <= max_lag and weights[-1] > _NEGLIGIBLE:
        weights.append(weights[-1] * p)
    total = math.fsum(weights)
    return [weight / total for weight in weights]

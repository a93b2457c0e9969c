"""Theory of drift: the stationary distance of replicas from each other and from the owner.

All formulas assume independent updates of a parameter, each with variance sigma^2 and mean mu, and give the mean
squared difference divided by sigma^2. `mean_squared` is mu^2 / sigma^2. For vectors, both are sums over the elements.

With a lead, an owner sends its value plus `lead` times its last update. A copy of age L is then the owner's value of L
steps ago plus `lead` times the update of that step.
"""

from stormtorch.theory.arguments import check_loss, check_max_lag, check_size
from stormtorch.theory.lag import lag_probabilities, lag_variance, mean_lag


def pair_drift(p: float, *, mean_squared: float = 0.0, max_lag: int | None = None, lead: float = 0.0) -> float:
    """Mean squared difference of two replicas over the variance of one update. Exact; derived here.

    Two replicas differ by the updates between the older and the newer of their two copies: 2p/(1-p^2) of them on
    average. The mean adds E(L1-L2)^2 mu^2, which is twice the variance of the lag: 2p/(1-p)^2 mu^2. If the copies
    differ in age, which has probability 2p/(1+p), a lead makes the newest of these updates count 1+lead times and adds
    lead times the update before the oldest: hence 2 lead (1+lead) times that probability. A lead does not change what
    the mean adds.
    """
    check_loss(p)
    check_max_lag(max_lag)
    check_size("mean_squared", mean_squared)
    check_size("lead", lead)
    apart, unequal = 2.0 * p / (1.0 - p * p), 2.0 * p / (1.0 + p)
    if max_lag is not None:
        apart, unequal = _bounded_pair(p, max_lag)
    return apart + 2.0 * lead * (1.0 + lead) * unequal + 2.0 * lag_variance(p, max_lag) * mean_squared


def pair_bound(p: float, *, lead: float = 0.0, max_lag: int | None = None) -> float:
    """Upper bound of the mean squared difference of two replicas, over the mean square of one update.

    A bound; derived here. It holds for updates with a constant mean square of which no two have a negative correlation:
    they may be independent, have a mean, or have momentum. A copy of age L lacks the updates of less than L steps ago
    and contains `lead` times the update of L steps ago in excess: of the update of j steps ago it has a_j too much,
    where a_j is -1, lead or 0. Two replicas differ by 2 cov(a_i, a_j) times the mean product of two updates, summed
    over all i and j. For i < j, and ages without a bound, that covariance is c p^j - c^2 p^(i+j) with c = p - (1-p)
    lead. If the lead is less than p/(1-p), the covariance is positive, and drift is largest for updates that are all
    equal: 2p/(1-p)^2. If the lead is more, drift is largest for independent updates. With a lead of exactly p/(1-p) the
    covariance is zero: the bound is then the drift itself, even for updates with negative correlation.
    """
    check_size("lead", lead)
    if max_lag is None:
        return max(pair_drift(p, lead=lead), 2.0 * lag_variance(p))
    check_loss(p)
    check_max_lag(max_lag)
    chances = lag_probabilities(p, max_lag)
    older = [1.0 - sum(chances[: age + 1]) for age in range(len(chances))]
    means = [lead * chance - more for chance, more in zip(chances, older, strict=True)]
    total = sum(more + lead**2 * chance - mean**2 for chance, more, mean in zip(chances, older, means, strict=True))
    for apart in range(1, len(chances)):
        together = sum(older[j] - lead * chances[j] - means[j - apart] * means[j] for j in range(apart, len(chances)))
        total += 2.0 * max(together, 0.0)
    return 2.0 * total


def pair_drift_published(p: float) -> float:
    """Pair drift as published for updates of mean zero (Weintraub), which counts every stale copy as one step old.

    It is the fixed point of D' = p^2 D + 2p(1-p), and is smaller than the exact value by the fraction p of it.
    """
    check_loss(p)
    return 2.0 * p / (1.0 + p)


def owner_drift(p: float, *, mean_squared: float = 0.0, max_lag: int | None = None, lead: float = 0.0) -> float:
    """Mean squared difference of a replica and the owner over the variance of one update. Exact; derived here.

    A copy of age L lacks L updates: their noise adds up to the mean lag, p/(1-p), and the mean adds E L^2 mu^2, which
    is p(1+p)/(1-p)^2 mu^2. A lead adds lead times one more update: the noise grows by lead^2, and the mean adds E
    (L-lead)^2 mu^2 instead.
    """
    check_size("mean_squared", mean_squared)
    check_size("lead", lead)
    mean = mean_lag(p, max_lag)
    return mean + lead**2 + (lag_variance(p, max_lag) + (mean - lead) ** 2) * mean_squared


def common_drift(p: float, *, mean_squared: float = 0.0, max_lag: int | None = None, lead: float = 0.0) -> float:
    """Common part of the drift of all replicas, which averaging many of them does not remove.

    Exact; derived here: it is the mean product of two replicas' distances from the owner, that is, `owner_drift` minus
    half of `pair_drift`. Without a lead it is p^2/(1-p^2) plus the squared mean lag times mu^2. With a lead of p/(1-p)
    and no bound on the lag it is 0 for any updates: of the update j steps ago, the fraction p^(j+1) of the
    copies lacks all, and the fraction (1-p) p^j has lead times as much in excess.
    """
    own = pair_drift(p, mean_squared=mean_squared, max_lag=max_lag, lead=lead) / 2.0
    common = owner_drift(p, mean_squared=mean_squared, max_lag=max_lag, lead=lead) - own
    return common if common > 1e-12 * own else 0.0  # less is a rounding error


def best_lead(p: float, mean_squared: float, max_lag: int | None = None) -> float:
    """Lead that brings replicas closest to the owner: the mean lag times mu^2 / (mu^2 + sigma^2).

    Exact; derived here: there the derivative of `owner_drift` by the lead is zero. A lead equal to the mean lag removes
    all of the drift that replicas have in common (`common_drift`), but increases the drift of each one.
    """
    check_size("mean_squared", mean_squared)
    return mean_lag(p, max_lag) * mean_squared / (1.0 + mean_squared)


def _bounded_pair(p: float, max_lag: int) -> tuple[float, float]:
    """Mean difference of the ages of two bounded copies, and the probability that they differ."""
    apart, equal, younger = 0.0, 0.0, 0.0
    for chance in lag_probabilities(p, max_lag):
        younger += chance
        equal += chance * chance
        apart += 2.0 * younger * max(1.0 - younger, 0.0)  # E|L1-L2| is the sum of 2 F (1-F)
    return apart, 1.0 - equal

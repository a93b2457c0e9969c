"""How far replicas are from each other and from the owner, in the long run.

All of it is for independent updates of a parameter, each with variance sigma^2 and mean mu, and is given as the mean
squared difference over sigma^2. `mean_squared` is mu^2 / sigma^2. For vectors both are sums over the elements.

With a lead, an owner sends its value ahead by `lead` times its last update, and the copy of age L is the owner's value
of L steps ago ahead by as much of the update of that step.
"""

from stormtorch.theory.arguments import check_loss, check_max_lag, check_size
from stormtorch.theory.lag import lag_chances, lag_variance, mean_lag


def pair_drift(p: float, *, mean_squared: float = 0.0, max_lag: int | None = None, lead: float = 0.0) -> float:
    """Mean squared difference of two replicas over the variance of one update. Exact; derived here.

    Two replicas differ by the updates between the older and the newer of their two copies: 2p/(1-p^2) of them on
    average. The mean adds E(L1-L2)^2 mu^2, which is twice the variance of the lag: 2p/(1-p)^2 mu^2. A lead makes the
    newest of these updates count 1+lead times and adds lead times the one before the oldest, if the copies differ in
    age at all, which they do with a chance of 2p/(1+p): hence 2 lead (1+lead) times that chance. It does nothing to
    what the mean adds.
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
    """What the mean squared difference of two replicas cannot exceed, over the mean square of one update.

    A bound; derived here. It holds for updates of a constant mean square of which no two have a negative correlation:
    they may be independent, have a mean, or momentum. A copy of age L lacks the updates of less than L steps ago and is
    ahead by `lead` times that of L steps ago: of the update of j steps ago it has a_j too much, which is -1, lead or 0.
    Two replicas differ by 2 cov(a_i, a_j) times the mean product of two updates, summed over all i and j. For i < j,
    and ages without a bound, that covariance is c p^j - c^2 p^(i+j) with c = p - (1-p) lead. Where the lead is less
    than p/(1-p), it adds, and drift is largest for updates that are all the same: 2p/(1-p)^2. Where the lead is more,
    drift is largest for independent ones. With a lead of p/(1-p) it is zero: the bound is then the drift itself, also
    for updates that turn back.
    """
    check_size("lead", lead)
    if max_lag is None:
        return max(pair_drift(p, lead=lead), 2.0 * lag_variance(p))
    check_loss(p)
    check_max_lag(max_lag)
    chances = lag_chances(p, max_lag)
    older = [1.0 - sum(chances[: age + 1]) for age in range(len(chances))]
    means = [lead * chance - more for chance, more in zip(chances, older, strict=True)]
    total = sum(more + lead**2 * chance - mean**2 for chance, more, mean in zip(chances, older, means, strict=True))
    for apart in range(1, len(chances)):
        together = sum(older[j] - lead * chances[j] - means[j - apart] * means[j] for j in range(apart, len(chances)))
        total += 2.0 * max(together, 0.0)
    return 2.0 * total


def pair_drift_published(p: float) -> float:
    """The same as published for updates of mean zero (Weintraub), which counts every stale copy as one step old.

    It is the fixed point of D' = p^2 D + 2p(1-p), and too small by the fraction p of the exact value.
    """
    check_loss(p)
    return 2.0 * p / (1.0 + p)


def owner_drift(p: float, *, mean_squared: float = 0.0, max_lag: int | None = None, lead: float = 0.0) -> float:
    """The same between a replica and the owner of what is compared. Exact; derived here.

    A copy of age L lacks L updates: their noise adds up to the mean lag, p/(1-p), and the mean adds E L^2 mu^2, that is
    p(1+p)/(1-p)^2 mu^2. A lead adds lead times one more update, lead^2 of noise, and leaves E (L-lead)^2 mu^2.
    """
    check_size("mean_squared", mean_squared)
    check_size("lead", lead)
    mean = mean_lag(p, max_lag)
    return mean + lead**2 + (lag_variance(p, max_lag) + (mean - lead) ** 2) * mean_squared


def common_drift(p: float, *, mean_squared: float = 0.0, max_lag: int | None = None, lead: float = 0.0) -> float:
    """What replicas are off by together, so that no mean over many of them takes it away: in squares, as above.

    Exact; derived here: it is the mean product of two replicas' distances to the owner, `owner_drift` less half of
    `pair_drift`. Without a lead it is p^2/(1-p^2) and the squared mean lag times mu^2. With a lead of p/(1-p) and no
    bound it is 0 for any updates whatever: of the update j steps ago, the fraction p^(j+1) of the copies lacks all and
    the fraction (1-p) p^j is ahead by lead times as much.
    """
    own = pair_drift(p, mean_squared=mean_squared, max_lag=max_lag, lead=lead) / 2.0
    common = owner_drift(p, mean_squared=mean_squared, max_lag=max_lag, lead=lead) - own
    return common if common > 1e-12 * own else 0.0  # less is rounding


def best_lead(p: float, mean_squared: float, max_lag: int | None = None) -> float:
    """The lead that brings replicas closest to the owner: the mean lag times mu^2 / (mu^2 + sigma^2).

    Exact; derived here: it is where the derivative of `owner_drift` by the lead is zero. The mean lag itself takes all
    of what replicas are off by together (`common_drift`), and pays for it with what they are off by each for itself.
    """
    check_size("mean_squared", mean_squared)
    return mean_lag(p, max_lag) * mean_squared / (1.0 + mean_squared)


def _bounded_pair(p: float, max_lag: int) -> tuple[float, float]:
    """Of two bounded copies: the mean difference of their ages, and the chance that they are not equally old."""
    apart, equal, younger = 0.0, 0.0, 0.0
    for chance in lag_chances(p, max_lag):
        younger += chance
        equal += chance * chance
        apart += 2.0 * younger * max(1.0 - younger, 0.0)  # E|L1-L2| is the sum of 2 F (1-F)
    return apart, 1.0 - equal

"""Theory of model averaging (RPS): every rank has its own model, and ranks average the models that arrive.

A round turns models X (a column per rank) into XW. W depends on what arrived at the owner of a block, which is drawn
from all ranks, and on what arrived from it. If A is the matrix that averages all ranks, `E[W W'] = a1 I + (1-a1) A`
and `E[W A W'] = a2 I + (1-a2) A`: 0 would be perfect averaging.
"""

import math

from stormtorch.theory.arguments import check_count, check_loss
from stormtorch.theory.gradients import mean_inverse_count


def mixing(p: float, n: int) -> tuple[float, float]:
    """Compute a1 and a2 as defined above; for many ranks they tend to p and to 2p(1-p)/(n-1).

    Exact; defined in RPS and derived here from the traces: a rank that gets the mean of |S| models has a column of
    squared length 1/|S|; a rank that does not get it has a column of length 1.
    """
    check_loss(p)
    check_count("n", n)
    if n == 1:
        return 0.0, 0.0
    e = mean_inverse_count(p, n)
    lost = (n - 1) * p  # mean number of ranks that do not receive the average
    lost_squared = lost * (1.0 - p) + lost**2
    a1 = (lost + (n - lost) * e - 1.0) / (n - 1)
    both = 2.0 * (n * lost - lost_squared) * (1.0 - e) / (n - 1)  # part of an average that is lost on its way back
    a2 = (((n * n - 2.0 * n * lost + lost_squared) * e + both + lost) / n - 1.0) / (n - 1)
    # Without loss both are 0; rounding must not make them negative.
    return max(a1, 0.0), max(min(a2, a1), 0.0)


def rate_factor(p: float, n: int) -> float:
    """Factor of loss in the leading term of the convergence rate: (1 + sqrt(n a2)) / (1 - sqrt(a1 - a2)).

    A bound (RPS). For many ranks it tends to (1 + sqrt(2p(1-p))) / (1 - sqrt(p)).
    """
    a1, a2 = mixing(p, n)
    return (1.0 + math.sqrt(n * a2)) / (1.0 - math.sqrt(a1 - a2))


def averaging_rate(p: float, n: int, steps: int) -> float:
    """Leading term of the convergence rate of the mean squared gradient: `rate_factor` / sqrt(n steps).

    A bound up to a constant of the problem (RPS): only ratios of two values have a meaning.
    """
    check_count("steps", steps)
    return rate_factor(p, n) / math.sqrt(n * steps)

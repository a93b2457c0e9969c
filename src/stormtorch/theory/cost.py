"""How many steps under loss come as far as `steps` without. None of these is exact: each says what it rests on."""

from stormtorch.theory.arguments import check_count
from stormtorch.theory.averaging import rate_factor
from stormtorch.theory.gradients import variance_inflation
from stormtorch.theory.lag import mean_lag


def lead_steps(p: float, n: int, steps: int) -> float:
    """For bounded drift with the lead: `steps` times the inflation of the gradient's variance.

    An approximation, derived here: where noise limits SGD, its error falls like sqrt(variance / steps), and the lead
    leaves replicas right on average. Where noise does not limit, as early in a training, loss costs less than that.
    """
    check_count("steps", steps)
    return steps * variance_inflation(p, n)


def plain_steps(p: float, n: int, steps: int, max_lag: int | None = None) -> float:
    """For bounded drift without a lead: the same, and the mean lag.

    An approximation from below, derived here: gradients come from parameters that are so many steps old, which at least
    delays all by as much. Optimizers with momentum and high learning rates suffer more from old gradients.
    """
    return lead_steps(p, n, steps) + mean_lag(p, max_lag)


def averaging_steps(p: float, n: int, steps: int) -> float:
    """For model averaging: `steps` times the square of `rate_factor`, as the rate falls like 1/sqrt(n steps).

    A ratio of two bounds (RPS), and so no bound itself. It is pessimistic: RPS's own trainings lose far less.
    """
    check_count("steps", steps)
    return steps * rate_factor(p, n) ** 2

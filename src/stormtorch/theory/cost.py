"""Theory of the cost of loss: steps under loss with the progress of `steps` without. All are approximations."""

from stormtorch.theory.arguments import check_count
from stormtorch.theory.averaging import rate_factor
from stormtorch.theory.gradients import variance_inflation
from stormtorch.theory.lag import mean_lag


def lead_steps(p: float, n: int, steps: int) -> float:
    """Steps of bounded drift with the lead: `steps` times the inflation of the gradient's variance.

    An approximation, derived here: if noise limits SGD, its error falls like sqrt(variance / steps), and with the lead,
    replicas are unbiased. While noise does not limit SGD, as early in a training, loss costs less.
    """
    check_count("steps", steps)
    return steps * variance_inflation(p, n)


def plain_steps(p: float, n: int, steps: int, max_lag: int | None = None) -> float:
    """Steps of bounded drift without a lead: `lead_steps` plus the mean lag.

    A lower approximation, derived here: gradients are computed from stale parameters, which delays training by at least
    the mean lag. Optimizers with momentum and high learning rates suffer more from stale gradients.
    """
    return lead_steps(p, n, steps) + mean_lag(p, max_lag)


def averaging_steps(p: float, n: int, steps: int) -> float:
    """Steps of model averaging: `steps` times the square of `rate_factor`, as the rate falls like 1/sqrt(n steps).

    A ratio of two bounds (RPS), and therefore not a bound itself. It is pessimistic: trainings in RPS lose far less.
    """
    check_count("steps", steps)
    return steps * rate_factor(p, n) ** 2

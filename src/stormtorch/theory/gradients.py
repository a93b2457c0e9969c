"""Theory of averaged gradients under loss: n ranks, of which the owner's own gradient always arrives.

Gradients of ranks are independent, each with mean g and variance s^2; `mean_squared` is g^2 / s^2, where for vectors
both are sums over the elements. Inflation is relative to the variance s^2/n of the mean of all n gradients.
"""

from stormtorch.theory.arguments import check_count, check_loss, check_size


def mean_inverse_count(p: float, n: int) -> float:
    """Mean of 1/count, where count is the number of gradients in the mean of what arrived, including the owner's.

    (1-p^n) / (n (1-p)). Exact; derived here: 1/count times the probability of that count is the probability of as many
    arrivals among n, divided by n (1-p). The variance of the averaged gradient is this times that of one rank's
    gradient.
    """
    check_loss(p)
    check_count("n", n)
    return (1.0 - p**n) / (n * (1.0 - p))


def variance_inflation(p: float, n: int) -> float:
    """Factor by which loss multiplies the variance of the mean of what arrived: n E[1/count], at most 1/(1-p).

    Exact if all ranks draw from one distribution, for which the mean of what arrived is unbiased; derived here from
    `mean_inverse_count`.
    """
    return n * mean_inverse_count(p, n)


def owner_overweight(p: float, n: int) -> float:
    """Fraction by which the owner's own gradient weighs more than 1/n on average: 0.11 is 11 % more.

    Exact; derived here: its weight is 1/count. This is a bias if ranks draw from different distributions.
    """
    return variance_inflation(p, n) - 1.0


def horvitz_thompson_inflation(p: float, n: int, mean_squared: float = 0.0) -> float:
    """Variance inflation of Horvitz and Thompson's estimate, in which each gradient that arrives weighs 1/(n (1-p)).

    (1 + (n-1) (1 + p mean_squared) / (1-p)) / n. Exact; derived here: a gradient that is lost with probability p,
    divided by 1-p, has the second moment (s^2+g^2)/(1-p). The estimate weights all ranks equally, at the cost of more
    variance if the mean is large: a random part of the mean is missing, too.
    """
    check_loss(p)
    check_count("n", n)
    check_size("mean_squared", mean_squared)
    return (1.0 + (n - 1) * (1.0 + p * mean_squared) / (1.0 - p)) / n

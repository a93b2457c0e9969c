"""What loss does to an averaged gradient: n ranks, of which the owner's own gradient always arrives.

Gradients of ranks are independent, with mean g and variance s^2 each; `mean_squared` is g^2 / s^2, where for vectors
both are sums over the elements. Inflation is over the variance s^2/n of the mean of all n.
"""

from stormtorch.theory.arguments import check_count, check_loss, check_size


def mean_inverse_count(p: float, n: int) -> float:
    """Mean of one over the number of copies that a mean of what arrived is made of, the owner's own always among them.

    (1-p^n) / (n (1-p)). Exact; derived here: one over the count times the chance of that count is, but for the factor
    n (1-p), the chance of as many among n. The variance of the averaged gradient is this times that of one rank's.
    """
    check_loss(p)
    check_count("n", n)
    return (1.0 - p**n) / (n * (1.0 - p))


def variance_inflation(p: float, n: int) -> float:
    """By how much loss multiplies the variance of the mean of what arrived: n E[1/count], at most 1/(1-p).

    Exact where all ranks draw from one distribution, for which the mean of what arrived is unbiased; derived here from
    `mean_inverse_count`.
    """
    return n * mean_inverse_count(p, n)


def owner_overweight(p: float, n: int) -> float:
    """How much more than 1/n the owner's own gradient weighs on average, as a fraction: 0.11 is 11 % more.

    Exact; derived here: it weighs 1/count whatever arrives. It is a bias where ranks draw from different distributions.
    """
    return variance_inflation(p, n) - 1.0


def horvitz_thompson_inflation(p: float, n: int, mean_squared: float = 0.0) -> float:
    """The same as `variance_inflation` for Horvitz and Thompson's estimate, in which what arrived weighs 1/(n (1-p)).

    (1 + (n-1) (1 + p mean_squared) / (1-p)) / n. Exact; derived here: what arrives of a gradient, over 1-p, has the
    second moment (s^2+g^2)/(1-p). It weighs all ranks alike, and pays for that where the mean is large: of the mean,
    too, a random part is missing.
    """
    check_loss(p)
    check_count("n", n)
    check_size("mean_squared", mean_squared)
    return (1.0 + (n - 1) * (1.0 + p * mean_squared) / (1.0 - p)) / n

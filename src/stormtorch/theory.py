"""What mathematics says about training under loss: pure functions, no tensors, nothing else of ours.

`p` is the chance that a chunk is lost, independently of all others; `n` the number of ranks.
"""


def pair_drift(p: float) -> float:
    """Mean squared difference of two replicas over the variance of one update, for independent updates of mean zero.

    Each copy is as old as it has lost in a row. Two replicas differ by the updates between the older and the newer of
    their two copies: 2p/(1-p^2) of them on average.
    """
    return 2.0 * p / (1.0 - p * p)


def pair_drift_published(p: float) -> float:
    """The same as published (Weintraub, Banner, Orda, 2025), which counts every stale copy as one step old."""
    return 2.0 * p / (1.0 + p)


def owner_drift(p: float) -> float:
    """The same between a replica and the owner of what is compared: the mean lag."""
    return p / (1.0 - p)


def lead(p: float) -> float:
    """By how many updates an owner's broadcast must be ahead so that replicas are right on average: the mean lag."""
    return p / (1.0 - p)


def mean_inverse_count(p: float, n: int) -> float:
    """Mean of one over the number of copies that a mean of what arrived is made of, the owner's own always among them.

    The variance of the averaged gradient is this times that of one rank's.
    """
    return (1.0 - p**n) / (n * (1.0 - p))

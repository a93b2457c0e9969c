"""Privacy accountant: epsilon from noise, sampling and steps, and the noise for an epsilon.

Each step releases the sum of gradients that are clipped to a norm C, plus Gaussian noise of standard deviation
`noise` C. Every sample is in a step with the same probability, independently (Poisson sampling). Two datasets are
neighbours if one has a sample more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any, Literal

from stormtorch.checks import check

Method = Literal["prv", "rdp"]
"""How privacy losses are composed: "prv" numerically, tight to 0.01; "rdp" by Renyi's divergence, quick and safe."""

_PRV_ERROR = 0.01
_MOST_NOISE = 1e6
_LARGEST = 1e4


def epsilon(noise: float, *, sample_rate: float, steps: int, delta: float, method: Method = "prv") -> float:
    """Returns an epsilon for which a training is (epsilon, delta)-differentially private.

    Args:
        noise: Noise multiplier: standard deviation of the noise in the sum of gradients, over the clipping norm.
        sample_rate: Probability of a sample to be in a step: the batch of all ranks together over all samples.
        steps: Number of steps.
        delta: Probability with which the guarantee may fail; less than one over the number of samples.
        method: How steps are composed. Without sampling, at a rate of 1, the closed form is exact and is used instead.

    Raises:
        ValueError: A setting has no sensible value.
        ImportError: Opacus is not installed, and there is sampling.
    """
    check(noise > 0.0, "noise", "be above 0", noise)
    check(0.0 < sample_rate <= 1.0, "sample_rate", "lie in (0, 1]", sample_rate)
    check(steps >= 1, "steps", "be at least 1", steps)
    check(0.0 < delta < 1.0, "delta", "lie in (0, 1)", delta)
    check(method in ("prv", "rdp"), "method", 'be "prv" or "rdp"', method)
    if sample_rate == 1.0:
        return _gaussian_epsilon(math.sqrt(steps) / noise, delta)
    if method == "rdp":
        return _with_opacus("RDPAccountant", noise, sample_rate, steps, delta)
    return _with_opacus("PRVAccountant", noise, sample_rate, steps, delta, eps_error=_PRV_ERROR)


def noise_for(
    epsilon_: float, *, sample_rate: float, steps: int, delta: float, method: Method = "prv", tolerance: float = 0.01
) -> float:
    """Returns the least noise multiplier that makes a training (epsilon, delta)-differentially private.

    Args:
        epsilon_: The wanted epsilon.
        sample_rate: Probability of a sample to be in a step.
        steps: Number of steps.
        delta: Probability with which the guarantee may fail.
        method: How steps are composed, as for `epsilon`.
        tolerance: How much more noise than the least is accepted, relative to it. It is never less.
    """
    check(epsilon_ > 0.0, "epsilon", "be above 0", epsilon_)
    check(tolerance > 0.0, "tolerance", "be above 0", tolerance)

    def of(way: Method) -> Callable[[float], float]:
        return lambda noise: epsilon(noise, sample_rate=sample_rate, steps=steps, delta=delta, method=way)

    # The quick method never underestimates epsilon, so its noise is an upper bound.
    alone = method == "rdp" or sample_rate == 1.0
    enough = _bisect(of("rdp"), epsilon_, *_bracket(of("rdp"), epsilon_), tolerance if alone else max(tolerance, 0.1))
    if alone:
        return enough
    return _bisect(of("prv"), epsilon_, 0.7 * enough, enough, tolerance)


def _bracket(found: Callable[[float], float], wanted: float) -> tuple[float, float]:
    high = 1.0
    while found(high) > wanted:
        high *= 2.0
        check(high <= _MOST_NOISE, "epsilon", "be larger: no noise is enough for it", wanted)
    low = high / 2.0
    while found(low) <= wanted:
        low, high = low / 2.0, low
    return low, high


def _bisect(found: Callable[[float], float], wanted: float, low: float, high: float, tolerance: float) -> float:
    """Returns a noise between two, for which epsilon is at most what is wanted."""
    while high > low * (1.0 + tolerance):
        middle = math.sqrt(low * high)
        if found(middle) <= wanted:
            high = middle
        else:
            low = middle
    return high


def _gaussian_epsilon(mu: float, delta: float) -> float:
    """Returns epsilon of one Gaussian mechanism of sensitivity over noise `mu` (Balle and Wang 2018, theorem 8).

    Steps without sampling are one mechanism: sensitivities add up as squares.
    """

    def delta_of(each: float) -> float:
        tail = NormalDist().cdf(-each / mu - mu / 2.0)
        # e^each overflows long before the product with so small a tail does.
        second = math.exp(each + math.log(tail)) if tail > 0.0 else 0.0
        return NormalDist().cdf(mu / 2.0 - each / mu) - second

    low, high = 0.0, 1.0
    if delta_of(low) <= delta:
        return 0.0
    while delta_of(high) > delta:
        low, high = high, 2.0 * high
        check(high <= _LARGEST, "noise", "be larger: epsilon would be above 10,000", 1.0 / mu)
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (middle, high) if delta_of(middle) > delta else (low, middle)
    return high


def _with_opacus(kind: str, noise: float, sample_rate: float, steps: int, delta: float, **how: Any) -> float:
    try:
        from opacus import accountants
    except ImportError as error:
        raise ImportError("epsilon with sampling needs Opacus: pip install 'stormtorch-lab[privacy]'") from error
    accountant = getattr(accountants, kind)()
    accountant.history = [(noise, sample_rate, steps)]
    return float(accountant.get_epsilon(delta=delta, **how))

"""Theory of layer-wise deadlines for the backward: which ranks reach which layer, and the best deadline of each step.

All of this is derived here, in the setting of SALF and ADEL-FL. A rank computes gradients from the last layer
backwards. Each layer takes an exponential time with the rank's own mean, so that the number of layers completed at a
deadline T is Poisson with mean T / layer_s. Layers are counted from the end: layer 1 is the last of the model, whose
gradient is computed first. At the deadline, the gradients of a layer are averaged over the ranks that have reached it,
and divided by 1 - missed, where `missed` is the probability that no rank has; a layer that no rank has reached is not
updated. This estimate is unbiased. If N ranks have reached a layer, with gradient g and variance s^2 per rank, its
second moment is

    E |estimate|^2 = |g|^2 / (1 - missed) + s^2 E[1/N; N > 0] / (1 - missed)^2.

A step of SGD with it on a smooth, strongly convex function changes the gap to the minimum as `Descent` says: it
shrinks by less the more often the first layer of the model is missed, and noise adds more the fewer ranks are in the
mean. Real losses are not convex: the result is a plan, not a guarantee.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stormtorch.checks import check
from stormtorch.theory.arguments import check_count, check_size

_KNOTS = 240
_MOST_PLANNED = 400
_MOST_ROUNDS = 500
_CONVERGED = 1e-9


@dataclass(frozen=True, kw_only=True)
class Backward:
    """Speed of the ranks' backward."""

    layers: int
    """Number of layers of the model; all take a rank equally long on average."""
    layer_s: tuple[float, ...]
    """Mean seconds per layer, for each rank."""

    def __post_init__(self) -> None:
        check_count("layers", self.layers)
        right = len(self.layer_s) > 0 and all(0.0 < each < math.inf for each in self.layer_s)
        check(right, "layer_s", "have a finite number above 0 for each rank", self.layer_s)


@dataclass(frozen=True, kw_only=True)
class Descent:
    """Bound on the progress of SGD, in dimensionless numbers.

    In step t, at r times the full learning rate, the gap to the minimum becomes

        gap (1 - contraction r (1 - curvature r / (1 - missed))) + noise r^2 inflation,

    where `missed` is that of the first layer and `inflation` the mean over layers. It follows from the inequality of
    smooth functions for one step, and from strong convexity, for the second moment above. For a smoothness S, a strong
    convexity M, a full rate e and n ranks with variance s^2 of each one's gradient, contraction is 2 M e, curvature is
    S e / 2, and noise is S e^2 s^2 / (2 n), divided by the gap at the beginning.
    """

    contraction: float
    """Fraction of the gap that a step removes at a small rate, in (0, 1]."""
    curvature: float = 0.1
    """Learning rate as a fraction of the largest at which noiseless descent converges, in [0, 1)."""
    floor: float = 0.01
    """Gap at which noise stops a training without stragglers, as a fraction of the initial gap."""

    def __post_init__(self) -> None:
        check(0.0 < self.contraction <= 1.0, "contraction", "lie in (0, 1]", self.contraction)
        check(0.0 <= self.curvature < 1.0, "curvature", "lie in [0, 1)", self.curvature)
        check_size("floor", self.floor)

    @property
    def noise(self) -> float:
        """Increase of the gap by noise in a step at the full rate, as a fraction of the initial gap."""
        return self.floor * self.contraction * (1.0 - self.curvature)


def layer_probabilities(layers: int, deadline_s: float, layer_s: float) -> list[float]:
    """Probability that a rank has the gradients of each layer at a deadline, the last layer of the model first.

    P(Poisson(deadline_s / layer_s) >= k) for k = 1, 2, ... Exact for exponential times; derived here.
    """
    check_count("layers", layers)
    check_size("deadline_s", deadline_s)
    check(0.0 < layer_s < math.inf, "layer_s", "be finite and above 0", layer_s)
    mean = deadline_s / layer_s
    found = []
    # Use the shorter of both sums, so that small probabilities suffer no cancellation.
    for k in range(1, layers + 1):
        if mean == 0.0:
            found.append(0.0)
        elif mean < k:
            term, total = math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)), 0.0
            j = k
            while term > 1e-17 * total:
                total += term
                j += 1
                term *= mean / j
            found.append(total)
        else:
            found.append(1.0 - sum(math.exp(j * math.log(mean) - mean - math.lgamma(j + 1)) for j in range(k)))
    return found


def layers_missed(backward: Backward, deadline_s: float) -> list[float]:
    """Probability that no rank has reached each layer at a deadline, the last layer of the model first. Exact."""
    return [1.0 - there for there, _ in _moments(backward, deadline_s)]


def layers_inflation(backward: Backward, deadline_s: float) -> list[float]:
    """Factor by which the deadline raises the variance of each layer's averaged gradient; the last layer first.

    n E[1/N; N > 0] / (1 - missed)^2, for n ranks with gradients of equal variance: exact; derived here. It excludes the
    contribution of the mean gradient, |g|^2 missed / (1 - missed). Infinite at a deadline of 0.
    """
    n = len(backward.layer_s)
    return [n * inverse / there**2 if there else math.inf for there, inverse in _moments(backward, deadline_s)]


def least_deadline(backward: Backward, missed: float = 0.9) -> float:
    """Shortest deadline at which the probability that no rank reaches the model's first layer is at most `missed`."""
    check(0.0 < missed < 1.0, "missed", "lie in (0, 1)", missed)
    low, high = 0.0, min(backward.layer_s)
    while layers_missed(backward, high)[-1] > missed:
        low, high = high, 2.0 * high
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (middle, high) if layers_missed(backward, middle)[-1] > missed else (low, middle)
    return high


def deadlines_bound(
    backward: Backward, descent: Descent, deadlines_s: Sequence[float], rates: Sequence[float] | None = None
) -> float:
    """Bound on the gap after steps with these deadlines, as a fraction of the initial gap; see `Descent`.

    Args:
        backward: Speed of the ranks.
        descent: The bound on a step.
        deadlines_s: Deadline of each step.
        rates: Learning rate of each step as a fraction of the full one; None is always the full one.
    """
    known: dict[float, tuple[float, float]] = {}
    for each in deadlines_s:
        if each not in known:
            known[each] = _costs(backward, each)
    return _gaps(descent, [known[each] for each in deadlines_s], _checked(rates, len(deadlines_s)))[-1]


def best_deadlines(
    backward: Backward, descent: Descent, steps: int, total_s: float, rates: Sequence[float] | None = None
) -> list[float]:
    """Deadlines with the least `deadlines_bound` whose sum is the total time.

    At the optimum, the marginal value of a second is equal in all steps, except those at the `least_deadline`, below
    which too many layers are missed. Found by repeatedly moving time to steps where it is worth more. More than some
    hundred steps are planned as that many, and the plan is interpolated.

    With a constant rate, late steps get more time, because their noise does not decay before the end. With a rate that
    falls as 1/t, which gives all steps the same weight at the end, a constant deadline is nearly optimal.

    Args:
        backward: Speed of the ranks.
        descent: The bound on a step.
        steps: Number of steps.
        total_s: Sum of the deadlines.
        rates: Learning rate of each step as a fraction of the full one; None is always the full one.
    """
    check_count("steps", steps)
    factors = _checked(rates, steps)
    least_s = least_deadline(backward)
    words = f"be finite and at least {steps * least_s:.4g} for {steps} steps, or layers are almost never reached"
    check(steps * least_s <= total_s < math.inf, "total_s", words, total_s)
    count = min(steps, _MOST_PLANNED)
    each = steps / count
    coarse = Descent(contraction=min(each * descent.contraction, 1.0), curvature=descent.curvature, floor=descent.floor)
    plan = _planned(backward, coarse, least_s, total_s / each, [factors[int(at * each)] for at in range(count)])
    if count == steps:
        return plan
    found = [max(_between(plan, (step + 0.5) / each - 0.5), least_s) for step in range(steps)]
    return _fitted(found, least_s, total_s)


# --- a rank's layers --------------------------------------------------------------------------------------------------


def _moments(backward: Backward, deadline_s: float) -> list[tuple[float, float]]:
    """Returns for each layer the probability that any rank has reached it, and E[1/N; N > 0] of these ranks."""
    n = len(backward.layer_s)
    if len(set(backward.layer_s)) == 1:
        chances = layer_probabilities(backward.layers, deadline_s, backward.layer_s[0])
        return [(_any_rank([chance] * n), _inverse_of_equal(chance, n)) for chance in chances]
    ranks = [layer_probabilities(backward.layers, deadline_s, each) for each in backward.layer_s]
    return [(_any_rank(chances), _inverse(chances)) for chances in zip(*ranks, strict=True)]


def _any_rank(chances: Sequence[float]) -> float:
    if max(chances) >= 1.0:
        return 1.0
    return -math.expm1(sum(math.log1p(-each) for each in chances))


def _inverse_of_equal(chance: float, n: int) -> float:
    """Returns E[1/N; N > 0] of a binomial N."""
    if chance in (0.0, 1.0):
        return chance / n
    there, not_there = math.log(chance), math.log1p(-chance)
    ways = (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) for k in range(1, n + 1))
    return sum(math.exp(way + k * there + (n - k) * not_there) / k for k, way in enumerate(ways, start=1))


def _inverse(chances: Sequence[float]) -> float:
    """Returns E[1/N; N > 0], where N counts events of different probabilities."""
    counts = [1.0]
    for chance in chances:
        missing = [(1.0 - chance) * each for each in counts]
        counts = [old + chance * one for old, one in zip([*missing, 0.0], [0.0, *counts], strict=True)]
    return sum(each / count for count, each in enumerate(counts) if count)


# --- the bound --------------------------------------------------------------------------------------------------------


def _costs(backward: Backward, deadline_s: float) -> tuple[float, float]:
    """Returns 1 / (1 - missed) of the first layer of the model, and the mean inflation over layers."""
    moments, n = _moments(backward, deadline_s), len(backward.layer_s)
    if moments[-1][0] == 0.0:
        return math.inf, math.inf
    return 1.0 / moments[-1][0], sum(n * inverse / there**2 for there, inverse in moments) / backward.layers


def _shrink(descent: Descent, rate: float, stretch: float) -> float:
    return 1.0 - descent.contraction * rate * (1.0 - descent.curvature * rate * stretch)


def _gaps(descent: Descent, costs: Sequence[tuple[float, float]], rates: Sequence[float]) -> list[float]:
    """Returns the gap before each step and at the end."""
    gaps = [1.0]
    for (stretch, inflation), rate in zip(costs, rates, strict=True):
        gaps.append(_shrink(descent, rate, stretch) * gaps[-1] + descent.noise * rate**2 * inflation)
    return gaps


def _checked(rates: Sequence[float] | None, steps: int) -> Sequence[float]:
    if rates is None:
        return [1.0] * steps
    right = len(rates) == steps and all(0.0 <= each <= 1.0 for each in rates)
    check(right, "rates", f"have a number in [0, 1] for each of {steps} steps", rates)
    return rates


# --- the plan ---------------------------------------------------------------------------------------------------------


class _Table:
    """Lookup table of the costs of a step and their slopes, between a shortest and a longest deadline."""

    def __init__(self, backward: Backward, low_s: float, high_s: float) -> None:
        self._low, self._apart = math.log(low_s), max(math.log(high_s / low_s), 1e-9) / (_KNOTS - 1)
        costs = [_costs(backward, math.exp(self._low + at * self._apart)) for at in range(-1, _KNOTS + 1)]
        logs = [(math.log(stretch), math.log(inflation)) for stretch, inflation in costs]
        self._rows = [
            (*here, *((b - a) / (2.0 * self._apart) for a, b in zip(before, after, strict=True)))
            for before, here, after in zip(logs, logs[1:], logs[2:], strict=False)
        ]

    def lookup(self, deadline_s: float) -> tuple[float, float, float, float]:
        """Returns stretch and inflation at a deadline, and the derivative of each."""
        position = min(max((math.log(deadline_s) - self._low) / self._apart, 0.0), _KNOTS - 1.0)
        first = min(int(position), _KNOTS - 2)
        part = position - first
        stretch, inflation, *slopes = (
            (1.0 - part) * a + part * b for a, b in zip(self._rows[first], self._rows[first + 1], strict=True)
        )
        stretch, inflation = math.exp(stretch), math.exp(inflation)
        return stretch, inflation, stretch * slopes[0] / deadline_s, inflation * slopes[1] / deadline_s


def _planned(
    backward: Backward, descent: Descent, least_s: float, total_s: float, rates: Sequence[float]
) -> list[float]:
    steps = len(rates)
    found = [total_s / steps] * steps
    longest_s = total_s - (steps - 1) * least_s
    if longest_s <= least_s * (1.0 + 1e-6):
        return found
    table = _Table(backward, least_s, longest_s)
    bound, worth = _worth(table, descent, found, rates)
    # Costs fall about like a power of the deadline, at most the number of layers: this is Newton's step.
    power = 1.0 / (backward.layers + 1)
    for _ in range(_MOST_ROUNDS):
        # Where a second is worth nothing, because no rank is late, time is not moved.
        tiny = 1e-12 * bound / total_s
        moved = [each * max(value, tiny) ** power for each, value in zip(found, worth, strict=True)]
        moved = _fitted(moved, least_s, total_s)
        new_bound, new_worth = _worth(table, descent, moved, rates)
        if new_bound > bound:
            power /= 2.0
            if power < 1e-3:
                break
            continue
        done = bound - new_bound < _CONVERGED * bound
        found, bound, worth = moved, new_bound, new_worth
        if done:
            break
    return found


def _worth(
    table: _Table, descent: Descent, deadlines_s: Sequence[float], rates: Sequence[float]
) -> tuple[float, list[float]]:
    """Returns the bound, and its decrease per additional second in each step."""
    costs = [table.lookup(each) for each in deadlines_s]
    gaps = _gaps(descent, [(stretch, inflation) for stretch, inflation, *_ in costs], rates)
    worth, left = [], 1.0  # fraction of a step's increase that remains at the end
    for (stretch, _, stretch_slope, inflation_slope), gap, rate in zip(
        reversed(costs), reversed(gaps[:-1]), reversed(rates), strict=True
    ):
        shrink_slope = descent.contraction * descent.curvature * rate**2 * stretch_slope
        worth.append(-left * (shrink_slope * gap + descent.noise * rate**2 * inflation_slope))
        left *= _shrink(descent, rate, stretch)
    return gaps[-1], worth[::-1]


def _fitted(weights: Sequence[float], least_s: float, total_s: float) -> list[float]:
    """Returns deadlines proportional to weights, each at least `least_s`, with sum `total_s`."""
    low, high = 0.0, total_s / max(weights)
    for _ in range(100):
        middle = (low + high) / 2.0
        if sum(max(least_s, middle * each) for each in weights) > total_s:
            high = middle
        else:
            low = middle
    return [max(least_s, low * each) for each in weights]


def _between(values: Sequence[float], place: float) -> float:
    place = min(max(place, 0.0), len(values) - 1.0)
    first = min(int(place), max(len(values) - 2, 0))
    last = min(first + 1, len(values) - 1)
    return values[first] + (place - first) * (values[last] - values[first])

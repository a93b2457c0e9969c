"""Theory of gradient deadlines against stragglers: the best compromise between waiting and a noisier mean.

`times` has the seconds of each rank's latest gradients, newest last, equally many per rank. A rank that misses the
deadline contributes in a later step, where its gradients count for all steps since its last contribution.
"""

import math
from collections.abc import Sequence
from statistics import median

from stormtorch.checks import check
from stormtorch.theory.arguments import check_size

Times = Sequence[Sequence[float]]

# Deadlines within this factor of the least cost are equivalent: the longest of them excludes the fewest ranks.
_AS_GOOD = 1.02
_CANDIDATES = 12


def step_seconds(times: Times, deadline_s: float) -> float:
    """Mean time until a step has the gradients that it waits for.

    A rank that usually misses the deadline is not waited for; any other is, at most until the deadline. Exact for the
    given times; derived here.
    """
    _check(times)
    return _step_seconds([each for each in times if median(each) <= deadline_s], deadline_s)


def steps_covered(seconds: float, deadline_s: float, step_s: float) -> int:
    """Number of steps that a contribution counts for, by its compute time: 1 if in time, otherwise 2 or more."""
    return 1 if seconds <= deadline_s or step_s <= 0.0 else max(2, math.ceil(seconds / step_s))


def lateness_inflation(times: Times, deadline_s: float, overhead_s: float = 0.0) -> float:
    """Factor by which late ranks raise the variance of the mean gradient.

    A rank that contributes in every k-th step, with weight k, adds k times the variance of one that contributes in
    every step: this is the mean of k over ranks. Exact for equal variances and steps of equal length; derived here. The
    contribution of the mean gradient itself is neglected, which matters if it is large compared with the noise.
    """
    return _mean_gap(times, deadline_s, step_seconds(times, deadline_s) + overhead_s)


def deadline_cost(times: Times, deadline_s: float, overhead_s: float = 0.0) -> float:
    """Seconds per unit of progress: the time of a step times the inflation of the variance of its gradient.

    If noise determines how many steps a training needs, that number grows like the variance.
    """
    _check(times)
    return _cost(times, [median(each) for each in times], deadline_s, overhead_s)


def best_deadline(times: Times, overhead_s: float = 0.0) -> float:
    """Deadline with the least cost among the measured times; of equivalent ones, the longest.

    At least half of the ranks are usually in time: a mean over fewer would differ too much from the full mean.

    Args:
        times: Seconds of the latest gradients of each rank.
        overhead_s: Seconds of a step outside gradient computation, which no deadline shortens.
    """
    _check(times)
    check_size("overhead_s", overhead_s)
    middles: list[float] = [median(each) for each in times]
    least = sorted(middles)[(len(middles) - 1) // 2]
    # Only times at which their rank is usually in time: a deadline just before a rank's median waits for it in vain.
    pairs = zip(times, middles, strict=True)
    seen = sorted({each for rank, middle in pairs for each in (*rank, middle) if each >= max(least, middle)})
    # The cost jumps at medians; the longest time waits for all ranks.
    stride = max(1, len(seen) // _CANDIDATES)
    candidates = sorted({*seen[::stride], *(each for each in middles if each >= least), seen[-1]})
    costs = [_cost(times, middles, each, overhead_s) for each in candidates]
    good = _AS_GOOD * min(costs)
    best: float = max(each for each, cost in zip(candidates, costs, strict=True) if cost <= good)
    return best


def _step_seconds(waited_for: Times, deadline_s: float) -> float:
    if not waited_for:
        return deadline_s
    longest: list[float] = [min(max(round_), deadline_s) for round_ in zip(*waited_for, strict=True)]
    return sum(longest) / len(longest)


def _mean_gap(times: Times, deadline_s: float, step_s: float) -> float:
    late = [seconds for each in times for seconds in each if seconds > deadline_s]
    beyond = sum(steps_covered(seconds, deadline_s, step_s) - 1 for seconds in late)
    return 1.0 + beyond / (len(times) * len(times[0]))


def _cost(times: Times, middles: Sequence[float], deadline_s: float, overhead_s: float) -> float:
    waited_for = [each for each, middle in zip(times, middles, strict=True) if middle <= deadline_s]
    step_s = _step_seconds(waited_for, deadline_s) + overhead_s
    return step_s * _mean_gap(times, deadline_s, step_s)


def _check(times: Times) -> None:
    check(len(times) > 0 and len(times[0]) > 0, "times", "have at least one rank and one time each", times)
    check(len({len(each) for each in times}) == 1, "times", "have as many times for each rank", times)

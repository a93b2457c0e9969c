"""Deadlines for gradients of ranks that compute at different speeds: what waiting is worth.

`times` has, for each rank, how many seconds its latest gradients took, the newest last, as many for each rank. A rank
whose gradients come after the deadline gives them in a later step, where they count for all steps since its last ones.
"""

import math
from collections.abc import Sequence
from statistics import median

from stormtorch.checks import check
from stormtorch.theory.arguments import check_size

Times = Sequence[Sequence[float]]

# A deadline that costs at most this much more than the best one is as good: the longest of them leaves out the fewest.
_AS_GOOD = 1.02
_CANDIDATES = 12


def step_seconds(times: Times, deadline_s: float) -> float:
    """Mean time until a step has the gradients that it waits for.

    A rank that usually takes longer than the deadline keeps nobody waiting; any other does, at most until the deadline.
    Exact for the given times; derived here.
    """
    _check(times)
    return _step_seconds([each for each in times if median(each) <= deadline_s], deadline_s)


def steps_covered(seconds: float, deadline_s: float, step_s: float) -> int:
    """Number of steps for which gradients count that took so long: 1 if they are in time, else 2 or more."""
    return 1 if seconds <= deadline_s or step_s <= 0.0 else max(2, math.ceil(seconds / step_s))


def lateness_inflation(times: Times, deadline_s: float, overhead_s: float = 0.0) -> float:
    """Factor by which late ranks raise the variance of the mean gradient.

    A rank that gives gradients in every k-th step, each weighed k times, adds k times the variance of one that gives
    them in every step: this is the mean of k over ranks. Exact for equal variances and steps of equal length; derived
    here. It leaves out what the mean gradient itself adds where it is large beside its noise.
    """
    return _mean_gap(times, deadline_s, step_seconds(times, deadline_s) + overhead_s)


def deadline_cost(times: Times, deadline_s: float, overhead_s: float = 0.0) -> float:
    """Seconds per unit of progress: the time of a step times the inflation of the variance of its gradient.

    Where noise decides how many steps a training needs, that number grows as the variance does.
    """
    _check(times)
    return _cost(times, [median(each) for each in times], deadline_s, overhead_s)


def best_deadline(times: Times, overhead_s: float = 0.0) -> float:
    """Deadline with the least cost among the times that were measured; of those that are as good, the longest.

    At least half of the ranks are usually in time: a mean over fewer would no longer be what the user asked for.

    Args:
        times: Seconds that the latest gradients of each rank took.
        overhead_s: Seconds of a step beside computing gradients, which no deadline shortens.
    """
    _check(times)
    check_size("overhead_s", overhead_s)
    middles: list[float] = [median(each) for each in times]
    least = sorted(middles)[(len(middles) - 1) // 2]
    # Only times of ranks that are then in time: one that lies just before a rank's usual time has it wait in vain.
    pairs = zip(times, middles, strict=True)
    seen = sorted({each for rank, middle in pairs for each in (*rank, middle) if each >= max(least, middle)})
    # Medians are where the cost jumps, and the longest time waits for everyone.
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

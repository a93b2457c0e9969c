"""Deadlines for stragglers: learned from how long ranks take, with inverse-probability weights for late gradients."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

from stormtorch import theory

_MOST_TIMES = 2048
_WINDOW = 16
_WARM_UP = 3
"""Steps that wait for every rank, before there is a deadline."""
_EVERY = 4
"""Steps between two updates of the deadline."""
_SLACK = 1.05
_LEAST_SLACK_S = 0.002


class Deadlines:
    """The deadline of one rank for its own gradients, from the times that all ranks report.

    Args:
        ranks: Number of ranks.
    """

    def __init__(self, ranks: int) -> None:
        window = max(4, min(_WINDOW, _MOST_TIMES // ranks))
        self._times: list[deque[float]] = [deque(maxlen=window) for _ in range(ranks)]
        self._overheads: deque[float] = deque(maxlen=_WINDOW)
        self._rounds = 0
        self.deadline_s: float | None = None
        """Seconds after which gradients are late, counted from when the rank has its parameters; None if unknown."""
        self.typical_s = 0.0
        """Seconds that gradients take on the median rank."""

    def learn(self, took_s: Mapping[int, float]) -> None:
        """Takes the times of a round.

        Args:
            took_s: Seconds that the latest gradients of each rank took.
        """
        for rank, seconds in took_s.items():
            self._times[rank].append(seconds)
        self._rounds += 1
        known = min(len(each) for each in self._times)
        if known < _WARM_UP or (self.deadline_s is not None and self._rounds % _EVERY):
            return
        times = [list(each)[-known:] for each in self._times]
        self.typical_s = median(median(each) for each in times)
        best_s = theory.best_deadline(times, min(self._overheads, default=0.0))
        self.deadline_s = max(_SLACK * best_s, best_s + _LEAST_SLACK_S)

    def record_overhead(self, seconds: float) -> None:
        """Takes how long a round lasted after this rank had its gradients. No deadline saves the shortest of these."""
        self._overheads.append(seconds)

    def usual_s(self, rank: int) -> float:
        """Returns how long gradients usually take on a rank."""
        return median(self._times[rank]) if self._times[rank] else 0.0


class InverseProbabilityWeights:
    """Horvitz-Thompson weights of gradients that contribute to some steps only: the inverse of their probability.

    Inverting a measured probability is biased, so each contribution weighs as much as the mean of the latest gaps
    between two contributions. The expectation of that mean is exactly 1 / probability, and over a training the weights
    add up to the number of steps, also where contributions are regular.

    Args:
        buckets: Number of buckets. Gradients of the last layers are ready first, and are late less often.
        first: Number of the first step.
        window: Gaps in the mean. One is enough to be unbiased; more reduce noise.
        most: Largest weight; larger ones would be mostly noise.
    """

    def __init__(self, buckets: int, first: int = 0, *, window: int = 32, most: float = 8.0) -> None:
        self._gaps: list[deque[int]] = [deque(maxlen=window) for _ in range(buckets)]
        self._last = [first - 1] * buckets
        self._weights = [1.0] * buckets
        self._most = most

    def weight(self, bucket: int, step: int) -> float:
        """Counts a bucket's contribution to a step, and returns its weight. A second call in a step changes nothing."""
        if step > self._last[bucket]:
            gaps = self._gaps[bucket]
            gaps.append(step - self._last[bucket])
            self._last[bucket] = step
            self._weights[bucket] = min(sum(gaps) / len(gaps), self._most)
        return self._weights[bucket]

    def chance(self, bucket: int) -> float:
        """Returns the measured probability that a step includes a bucket's gradients."""
        gaps: Sequence[int] = self._gaps[bucket]
        return len(gaps) / sum(gaps) if gaps else 1.0

    @property
    def bias(self) -> float:
        """Fraction by which gradients weigh too little because weights are capped: the largest over all buckets."""
        return max((1.0 - min(1.0, self.chance(bucket) * self._most) for bucket in range(len(self._gaps))), default=0.0)

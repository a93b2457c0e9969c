"""What a session under a deadline learns: how long ranks take, when to go on, and how late gradients weigh."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

from stormtorch import theory

_MOST_TIMES = 2048
_WINDOW = 16
_WARM_UP = 3
"""Steps in which everybody is waited for, before there is a deadline."""
_EVERY = 4
"""Steps after which a deadline is learned anew."""
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
        """Seconds from having parameters on after which gradients are late; None while it is not known yet."""
        self.typical_s = 0.0
        """Seconds that gradients take on the rank in the middle."""

    def learn(self, took_s: Mapping[int, float]) -> None:
        """Takes the times of a round: how long the latest gradients of each rank took."""
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
        """Takes how long a round lasted after this rank had its gradients. The shortest is what no deadline saves."""
        self._overheads.append(seconds)

    def usual_s(self, rank: int) -> float:
        """Returns how long gradients usually take on a rank."""
        return median(self._times[rank]) if self._times[rank] else 0.0


class InverseProbabilityWeights:
    """Weights of gradients that come in some steps only: the inverse of their measured chance, by Horvitz and Thompson.

    The inverse of a measured chance is biased. The mean of the latest gaps between two gifts is not: its mean is
    exactly 1 / chance, whatever the chance, and over a training weights add up to the number of steps, also where
    gradients come regularly. So each gift weighs that mean.

    Args:
        buckets: Number of buckets. Gradients of the last layers are ready first, and are late less often.
        first: Number of the first step.
        window: Gaps in the mean. One would be enough to be unbiased; more have less noise.
        most: Largest weight: more would be mostly noise.
    """

    def __init__(self, buckets: int, first: int = 0, *, window: int = 32, most: float = 8.0) -> None:
        self._gaps: list[deque[int]] = [deque(maxlen=window) for _ in range(buckets)]
        self._last = [first - 1] * buckets
        self._weights = [1.0] * buckets
        self._most = most

    def weight(self, bucket: int, step: int) -> float:
        """Counts a bucket's gradients as given in a step, and returns their weight. Asking twice changes nothing."""
        if step > self._last[bucket]:
            gaps = self._gaps[bucket]
            gaps.append(step - self._last[bucket])
            self._last[bucket] = step
            self._weights[bucket] = min(sum(gaps) / len(gaps), self._most)
        return self._weights[bucket]

    def chance(self, bucket: int) -> float:
        """Returns the measured chance that a step has a bucket's gradients."""
        gaps: Sequence[int] = self._gaps[bucket]
        return len(gaps) / sum(gaps) if gaps else 1.0

    @property
    def bias(self) -> float:
        """Fraction by which gradients weigh too little, at most over buckets, as weights have a limit; 0 if none do."""
        return max((1.0 - min(1.0, self.chance(bucket) * self._most) for bucket in range(len(self._gaps))), default=0.0)

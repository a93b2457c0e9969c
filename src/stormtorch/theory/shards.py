"""Model of a step with shards of different sizes, and the partition with the shortest step.

A step has two stages, one after the other: the optimizer starts once all gradients are averaged. Among n ranks, a rank
that owns the share x of S bytes sends (1-x) S of gradients and receives (n-1) x S in the first stage. In the second one
it runs the optimizer on its share, sends (n-1) x S of parameters and receives (1-x) S.

So a large share loads the inbound direction first and the outbound one later; a small one does the opposite. On a
symmetric full-duplex link the equal share 1/n is best, however slow the link is. A smaller one pays on an asymmetric
link, on a shared medium (Wi-Fi), and on a slow processor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stormtorch.checks import check

_TURNS = 48
# Relative tolerance of the searches; shares may use as much extra time, to stay as equal as possible.
_SLACK = 1e-3
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0


@dataclass(frozen=True, slots=True)
class HostSpeed:
    """Speed of one rank's link and processor."""

    up: float = math.inf
    """Outbound bytes per second of its link."""
    down: float = math.inf
    """Inbound bytes per second of its link."""
    both: float = math.inf
    """Bytes per second in both directions together: `up` + `down`, or less on a shared medium."""
    step_s: float = 0.0
    """Seconds that its processor would need to run the optimizer on all parameters."""

    def __post_init__(self) -> None:
        for name in ("up", "down", "both"):
            check(getattr(self, name) > 0.0, name, "be above 0", getattr(self, name))
        check(0.0 <= self.step_s < math.inf, "step_s", "be finite and not negative", self.step_s)


@dataclass(frozen=True, slots=True)
class ShardTimes:
    """Time of a step for given speeds as a function of the shares, without loss and headers."""

    speeds: Sequence[HostSpeed]
    size_bytes: float
    """Bytes of all parameters on the wire."""
    followers: float = 0.0
    """Additional copies of its share that an owner sends in the second stage, such as the gradient for its standby. It
    receives as many from another owner, assumed to own an equal share."""

    def __post_init__(self) -> None:
        check(len(self.speeds) >= 1, "speeds", "have at least one rank", len(self.speeds))
        check(self.size_bytes > 0.0, "size_bytes", "be above 0", self.size_bytes)
        check(self.followers >= 0.0, "followers", "not be negative", self.followers)

    def gradients_s(self, rank: int, share: float) -> float:
        """Seconds of the first stage at one rank."""
        speed, others = self.speeds[rank], len(self.speeds) - 1
        out, into = (1.0 - share) * self.size_bytes, others * share * self.size_bytes
        return max(out / speed.up, into / speed.down, (out + into) / speed.both)

    def parameters_s(self, rank: int, share: float) -> float:
        """Seconds of the second stage at one rank, including its optimizer."""
        speed, copies = self.speeds[rank], len(self.speeds) - 1 + self.followers
        out, into = copies * share * self.size_bytes, (1.0 - share + self._followed) * self.size_bytes
        steps_s = speed.step_s * share
        return max(steps_s + out / speed.up, into / speed.down, steps_s + (out + into) / speed.both)

    @property
    def _followed(self) -> float:
        return self.followers / len(self.speeds)

    def step_s(self, shares: Sequence[float]) -> float:
        """Seconds of both stages: each ends with its slowest rank."""
        ranks = range(len(self.speeds))
        check(len(shares) == len(self.speeds), "shares", f"have one per rank, {len(self.speeds)}", len(shares))
        return max(self.gradients_s(k, shares[k]) for k in ranks) + max(self.parameters_s(k, shares[k]) for k in ranks)

    def best(self) -> list[float]:
        """Returns the shares with the shortest `step_s`; of several, the most equal ones.

        If the stages may take A and B seconds, a rank's share lies in an interval that grows with both. The least B for
        a given A is found by bisection, and A by golden-section search for the minimum of A + B, which is convex in A.
        """
        ranks = len(self.speeds)
        equal = [1.0 / ranks] * ranks
        most_s = self.step_s(equal)
        if ranks == 1 or most_s == 0.0:
            return equal
        low, high = self._least(lambda first_s: self._fits(first_s, most_s), most_s), most_s
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        at_left, at_right = self._total(left, most_s), self._total(right, most_s)
        while high - low > _SLACK / 4 * most_s:
            if at_left <= at_right:
                high, right, at_right = right, left, at_left
                left = high - _GOLDEN * (high - low)
                at_left = self._total(left, most_s)
            else:
                low, left, at_left = left, right, at_right
                right = low + _GOLDEN * (high - low)
                at_right = self._total(right, most_s)
        first_s = left if at_left <= at_right else right
        second_s = min(at_left, at_right) - first_s
        return self._most_equal(first_s + _SLACK * most_s / 2, second_s + _SLACK * most_s / 2)

    def _total(self, first_s: float, most_s: float) -> float:
        return first_s + self._least(lambda second_s: self._fits(first_s, second_s), most_s)

    @staticmethod
    def _least(fits: object, most_s: float) -> float:
        """Returns the least time that fits; `most_s` fits, up to rounding."""
        assert callable(fits)
        low, high = 0.0, most_s
        for _ in range(_TURNS):
            middle = (low + high) / 2
            low, high = (low, middle) if fits(middle) else (middle, high)
            if high - low < _SLACK / 16 * most_s:
                break
        return high

    def _interval(self, rank: int, first_s: float, second_s: float) -> tuple[float, float]:
        """Returns the least and the largest share with which a rank completes its stages within these times."""
        speed, n, size = self.speeds[rank], len(self.speeds), self.size_bytes
        copies = n - 1 + self.followers
        low = max(0.0, 1.0 - first_s * speed.up / size, 1.0 + self._followed - second_s * speed.down / size)
        high = min(
            1.0,
            _over(first_s, (n - 1) * size / speed.down),
            _over(second_s, speed.step_s + copies * size / speed.up),
        )
        if speed.both < math.inf:
            all_s = size / speed.both
            first = _over(first_s - all_s, (n - 2) * all_s)
            second = _over(second_s - (1.0 + self._followed) * all_s, speed.step_s + (copies - 1) * all_s)
            high = min(high, first, second)
        return low, high

    def _fits(self, first_s: float, second_s: float) -> bool:
        intervals = [self._interval(rank, first_s, second_s) for rank in range(len(self.speeds))]
        fits = all(low <= high for low, high in intervals)
        return fits and sum(low for low, _ in intervals) <= 1.0 <= sum(high for _, high in intervals)

    def _most_equal(self, first_s: float, second_s: float) -> list[float]:
        intervals = [self._interval(rank, first_s, second_s) for rank in range(len(self.speeds))]
        low, high = 0.0, 1.0
        for _ in range(_TURNS):
            level = (low + high) / 2
            low, high = (low, level) if sum(_clipped(level, each) for each in intervals) >= 1.0 else (level, high)
        shares = [_clipped(high, each) for each in intervals]
        return [share / sum(shares) for share in shares]


def _over(time_s: float, per_share_s: float) -> float:
    """Returns the share that takes `time_s`, if the whole takes `per_share_s`."""
    if per_share_s <= 0.0:
        return math.inf if time_s >= 0.0 else -math.inf
    return time_s / per_share_s


def _clipped(level: float, interval: tuple[float, float]) -> float:
    low, high = interval
    return max(low, min(level, high))

"""Shard sizing: each rank's share of the parameters is equal, set by the user's weights, or set by measured speed.

Every report has the speed of its sender's bottleneck and processor. If other shares would make steps sufficiently
shorter, the lowest member requests a view with the same members. When it begins, all members compute the same shares
from the speeds in the handshake, and the shards move with their optimizer state. `theory/shards.py` has the formulas.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from stormtorch.collectives.wire import element_bytes
from stormtorch.policies.policy import OwnerPolicy
from stormtorch.runtime.memory.layout import SHARE_UNITS
from stormtorch.theory.shards import HostSpeed, ShardTimes

GAIN = 1.1
"""Predicted speed-up of a step that is worth requesting a view: a view costs more than a step."""
# In a view that begins, equal or previous shares stay if others would gain less than this. It is smaller than `GAIN`,
# because measured speeds change until the view begins, and some views would change nothing otherwise.
_LEAST_GAIN_IN_VIEW = 1.05
LEAST_STEPS = 12
"""Least number of steps from one repartition to the next."""
_MOST_STEPS = 400
_EVERY = 4
_REMEMBERED = 8

ShardSizes = tuple[int, ...]
"""Share of each member, in units of 1 / `SHARE_UNITS`."""


class Speed(NamedTuple):
    """Measured speed of one rank, as sent in reports; 0 where unknown."""

    up: float = 0.0
    """Outgoing bytes per second of its bottleneck."""
    down: float = 0.0
    """Incoming bytes per second of its bottleneck."""
    step_s: float = 0.0
    """Seconds that its processor would need to run the optimizer on all parameters."""

    @property
    def known(self) -> bool:
        """Whether the bottleneck was measured."""
        return self.up > 0.0 and self.down > 0.0

    def host(self, ranks: int = 1) -> HostSpeed:
        """Returns the speed of a host with `ranks` ranks like this one.

        The two directions count as independent: exchanges rarely fill both at once, so measurements do not show whether
        they share a medium.
        """
        return HostSpeed(ranks * self.up, ranks * self.down, step_s=self.step_s)


def parse_speed(reported: object) -> Speed:
    """Reads a speed that another rank has reported. An invalid one counts as unknown."""
    if not isinstance(reported, Sequence) or len(reported) != len(Speed._fields):
        return Speed()
    speed = Speed(*(float(each) for each in reported))
    sound = all(math.isfinite(each) and 0.0 <= each <= 1e15 for each in speed)
    return speed if sound else Speed()


class SpeedMeter:
    """Measures the rate of this rank's bottleneck and the speed of its processor.

    Args:
        take_peaks: Returns the peak rates of the bottleneck since the last call: out, in, and both at once.
    """

    def __init__(self, take_peaks: Callable[[], tuple[float, float, float]]) -> None:
        self._take_peaks = take_peaks
        self._up: deque[float] = deque(maxlen=_REMEMBERED)
        self._down: deque[float] = deque(maxlen=_REMEMBERED)
        self._steps_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._began: float | None = None
        self.speed = Speed()
        """The latest measurement."""

    def read(self) -> Speed:
        """Returns a new measurement. Called once per round."""
        up, down, _ = self._take_peaks()
        for peak, peaks in ((up, self._up), (down, self._down)):
            if peak > 0.0:  # short steps do not fill a window each
                peaks.append(peak)
        step_s = statistics.median(self._steps_s) if self._steps_s else 0.0
        self.speed = Speed(_second_largest(self._up), _second_largest(self._down), step_s)
        return self.speed

    def step_begins(self) -> None:
        """Called before the user's optimizer steps."""
        self._began = time.perf_counter()

    def step_ends(self, share: float, ranks: int) -> None:
        """Called after the user's optimizer has stepped on a share of the parameters."""
        # On a small share, the overhead of the call would dominate.
        if self._began is not None and 2.0 * share * ranks >= 1.0:
            self._steps_s.append((time.perf_counter() - self._began) / share)
        self._began = None


def _second_largest(values: Collection[float]) -> float:
    """Returns the second largest value, as one window may hold a burst; the largest of fewer than three, 0 of none."""
    return sorted(values)[-1 if len(values) < 3 else -2] if values else 0.0


class ShardSizing:
    """Decides how much each member owns, and when other shares would be worth a view.

    Args:
        policy: The user's policy.
        size_bytes: Bytes of all parameters in the number format that travels.
        standbys: Number of standbys of each shard.
        owners: Number of ranks at the start.
        label: Returns the number of a rank in the group that was prepared.

    Raises:
        ValueError: The policy has weights for another number of ranks.
    """

    def __init__(
        self, policy: OwnerPolicy, size_bytes: float, standbys: int, owners: int, label: Callable[[int], int]
    ) -> None:
        self._weights = None if isinstance(policy.shards, str) else policy.shards
        self.measured = policy.shards == "rate"
        """Whether shares follow measured speeds."""
        if self._weights is not None and len(self._weights) != owners:
            raise ValueError(f"shards must have one weight per rank, {owners}, got {len(self._weights)}")
        self._size_bytes = size_bytes
        # The gradient for a standby travels as float32.
        self._followers = standbys * 4.0 / element_bytes(policy.wire)
        self._label = label
        self._seen = 0
        self._requested_in_view = -1
        self._least_interval_steps = LEAST_STEPS
        self._requested_at_step: int | None = None

    def at_start(self, members: Sequence[int]) -> ShardSizes | None:
        """Returns the shares by the user's weights, before any speed is known; None means equal shares."""
        if self._weights is None:
            return None
        known = len(self._weights)
        mean = sum(self._weights) / known
        labels = [self._label(rank) for rank in members]
        return rounded([self._weights[each] if each < known else mean for each in labels])

    def decide(
        self,
        members: Sequence[int],
        reported: Mapping[int, Speed],
        before: Mapping[int, float],
        machines: Sequence[Sequence[int]],
    ) -> ShardSizes | None:
        """Returns the shares of a view that begins, the same on all members; None means equal shares.

        Args:
            members: Ranks of the view.
            reported: Speed that each member has reported.
            before: Share of each rank in the view before; empty if they were equal.
            machines: Indices of the members of each machine if exchanges are hierarchical; otherwise one list for each.
        """
        if not self.measured:
            return self.at_start(members)
        kept = [before.get(rank, 0.0) for rank in members]
        old = rounded(kept) if all(rank in before for rank in members) else None
        known = [reported[rank] for rank in members if reported[rank].known]
        if not known:
            return old
        usual = Speed(*(statistics.median(each) for each in zip(*known, strict=True)))
        speeds = [reported[rank] if reported[rank].known else usual for rank in members]
        times, best = self._best(speeds, machines)
        for parts in (old, None):
            if times(parts) <= _LEAST_GAIN_IN_VIEW * times(best):
                return parts
        return best

    def _best(
        self, speeds: Sequence[Speed], machines: Sequence[Sequence[int]]
    ) -> tuple[Callable[[ShardSizes | None], float], ShardSizes | None]:
        """Returns a function that predicts the seconds of a step with given shares, and the best shares."""
        hosts = []
        for indices in machines:
            mine = [speeds[index] for index in indices]
            mean = Speed(*(statistics.fmean(each) for each in zip(*mine, strict=True)))
            # The ranks of a machine step at the same time, each on its part of the machine's share.
            hosts.append(mean._replace(step_s=max(each.step_s for each in mine) / len(mine)).host(len(mine)))
        times = ShardTimes(hosts, self._size_bytes, self._followers if len(speeds) >= 3 else 0.0)

        def predicted(parts: ShardSizes | None) -> float:
            if parts is None:
                return times.step_s([len(indices) / len(speeds) for indices in machines])
            return times.step_s([sum(parts[index] for index in indices) / SHARE_UNITS for indices in machines])

        shares = [0.0] * len(speeds)
        for indices, share in zip(machines, times.best(), strict=True):
            for index in indices:
                shares[index] = share / len(indices)
        return predicted, rounded(shares)

    def pays(
        self,
        speeds: Sequence[Speed],
        parts: ShardSizes | None,
        machines: Sequence[Sequence[int]],
        step: int,
        since: int,
    ) -> bool:
        """Whether other shares have been worth a view for some steps, so that the lowest member should request one.

        Args:
            speeds: Speed of each member, from this round's reports.
            parts: Current shares of the members; None means equal shares.
            machines: See `decide`.
            step: Number of the step.
            since: Number of the step at which the view began.
        """
        if (
            step - since < self._least_interval_steps
            or (step - since) % _EVERY
            or not all(each.known for each in speeds)
        ):
            return False
        predicted, best = self._best(speeds, machines)
        gains = predicted(parts) > GAIN * predicted(best)
        self._seen = self._seen + 1 if gains else 0
        if self._seen < 2 or self._requested_in_view == since:
            return False
        self._requested_in_view, self._seen = since, 0
        # Speeds that keep changing are not worth following, so a repartition soon after another doubles the interval.
        soon = self._requested_at_step is not None and step - self._requested_at_step < 10 * self._least_interval_steps
        self._least_interval_steps = min(2 * self._least_interval_steps, _MOST_STEPS) if soon else LEAST_STEPS
        self._requested_at_step = step
        return True


def rounded(shares: Sequence[float]) -> ShardSizes | None:
    """Returns shares, of any sum, in units of 1 / `SHARE_UNITS`; None if all are equal or the sum is 0."""
    total = sum(shares)
    if not total > 0.0 or all(each == shares[0] for each in shares):
        return None
    ends = [round(SHARE_UNITS * sum(shares[: index + 1]) / total) for index in range(len(shares))]
    return tuple(end - begin for begin, end in zip([0, *ends[:-1]], ends, strict=True))


def indices_by_machine(members: Sequence[int], machines: Mapping[int, str], *, hierarchy: bool) -> list[list[int]]:
    """Returns the indices of the members of each machine; each member alone if exchanges are not hierarchical.

    Args:
        members: Ranks of a view.
        machines: Machine of each rank; empty where it is unknown.
        hierarchy: Whether exchanges are hierarchical where the layout of machines allows it.
    """
    found: dict[str, list[int]] = {}
    for index, rank in enumerate(members):
        found.setdefault(machines.get(rank, ""), []).append(index)
    each = len(next(iter(found.values())))
    even = all(len(indices) == each for indices in found.values())
    if not hierarchy or "" in found or not even or each == 1 or len(found) == 1:
        return [[index] for index in range(len(members))]
    return list(found.values())


def describe_sizes(parts: ShardSizes | None, labels: Sequence[int]) -> str:
    """Describes how much each member owns."""
    if parts is None:
        return "all ranks own equal shares"
    reported = ", ".join(f"rank {label} {part / SHARE_UNITS:.1%}" for label, part in zip(labels, parts, strict=True))
    return f"ranks own shares: {reported}"


def received_speed(each: Mapping[str, Any]) -> Speed:
    """Returns the speed that a rank reported in the handshake of a view."""
    return parse_speed(each.get("speed"))

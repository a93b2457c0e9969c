"""Deadlines under pressure: a step gives up what neighbours on the network delay, as far as the user allows it."""

from __future__ import annotations

from dataclasses import replace

from stormtorch.reliability import Reliability
from stormtorch.runtime.memory.arrival_counts import ArrivalCounts

_WARM_UP = 4
"""Rounds in which everything is waited for, before there is a deadline."""
_SLACK = 1.25
"""Times the shortest complete round that a deadline lasts at least: rounds differ a little without any neighbour."""
_MEMORY = 8
"""Rounds over which losses are averaged."""
_LONGER, _SHORTER = 1.0, 0.25
"""By how much a deadline changes in a round for what was lost above or below what is allowed, as parts of that."""
_COMPLETE = 0.002
"""Loss up to which a round counts as complete: random loss of a good network."""


class AdaptiveDeadline:
    """The deadline of one stage of an exchange on one rank.

    The deadline becomes shorter while less is lost than allowed, and longer while more is. So without neighbours it
    ends nothing, and beside them a step costs what the user allows to lose before it costs time.

    Args:
        allowed: Fraction of the stage's chunks that may be lost, on average over some rounds; None sets no deadline.
        exact: Whether the stage is repaired until nothing is missing, so that nothing may be given up.
    """

    def __init__(self, allowed: float | None, *, exact: bool = False) -> None:
        self._allowed = None if exact else allowed
        self._fastest_s: float | None = None
        self._rounds = 0
        self._loss = 0.0
        self.deadline_s: float | None = None
        """Seconds that the stage may take; None while they are not known."""

    def learn(self, links: ArrivalCounts) -> None:
        """Takes what arrived in a round, and how long that took."""
        if self._allowed is None:
            return
        lost, chunks = links.counts()
        if not chunks or not links.longest_s:
            return
        loss = lost / chunks
        self._rounds += 1
        self._loss += (loss - self._loss) / min(self._rounds, _MEMORY)
        if loss <= _COMPLETE or self._fastest_s is None:
            self._fastest_s = min(self._fastest_s or links.longest_s, links.longest_s)
        if self._rounds < _WARM_UP:
            return
        if self.deadline_s is None:
            self.deadline_s = 2.0 * _SLACK * self._fastest_s
        excess = self._loss - self._allowed
        self.deadline_s *= 1.0 + (_LONGER if excess > 0.0 else _SHORTER) * excess
        self.deadline_s = max(self.deadline_s, _SLACK * self._fastest_s)

    def within(self, stage: Reliability, *, part: float = 1.0) -> Reliability:
        """Returns the reliability of a stage with its deadline, or with a part of it; the user's own is kept."""
        if self.deadline_s is None or stage.deadline_s is not None:
            return stage
        return replace(stage, deadline_s=part * self.deadline_s)

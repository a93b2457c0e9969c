"""Adaptive deadlines of exchanges: under competing traffic, a step loses up to `allowed_loss` instead of waiting."""

from __future__ import annotations

from dataclasses import replace

from stormtorch.exchange.reliability import Reliability
from stormtorch.runtime.memory.arrival_counts import ArrivalCounts

_WARM_UP = 4
"""Rounds that wait for everything, before there is a deadline."""
_SLACK = 1.25
"""Least deadline, as a multiple of the shortest complete round: rounds vary a little without competing traffic."""
_MEMORY = 8
"""Rounds over which losses are averaged."""
_LONGER, _SHORTER = 1.0, 0.25
"""Relative change of a deadline per round, as a multiple of the loss above or below the allowed loss."""
_COMPLETE = 0.002
"""Loss up to which a round counts as complete: random loss of a good network."""


class AdaptiveDeadline:
    """The deadline of one stage of an exchange on one rank.

    The deadline becomes shorter while less is lost than allowed, and longer while more is. So without competing traffic
    it cuts nothing off, and with it a step first loses what the user allows and only then takes longer.

    Args:
        allowed: Fraction of the stage's chunks that may be lost, on average over some rounds; None sets no deadline.
        exact: Whether the stage retransmits until nothing is missing, so that there is no deadline.
    """

    def __init__(self, allowed: float | None, *, exact: bool = False) -> None:
        self._allowed = None if exact else allowed
        self._fastest_s: float | None = None
        self._rounds = 0
        self._loss = 0.0
        self.deadline_s: float | None = None
        """Seconds that the stage may take; None while there is no deadline."""

    def learn(self, links: ArrivalCounts) -> None:
        """Takes the arrivals of a round, and how long they took."""
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
        """Returns the reliability of a stage with this deadline, or a part of it. The user's own deadline is kept."""
        if self.deadline_s is None or stage.deadline_s is not None:
            return stage
        return replace(stage, deadline_s=part * self.deadline_s)

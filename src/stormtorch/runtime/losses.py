"""What is lost of what one rank sends, as the others tell it at every step."""

import math
from collections.abc import Mapping, Sequence

from stormtorch.policies import rules
from stormtorch.policies.guard import LossMeter
from stormtorch.policies.policy import Policy
from stormtorch.runtime.reports import Report


class Losses:
    """Measured from counts of chunks.

    Args:
        policy: What may be lost.
        rank: Who sends.
        chunks: Of each owner's shards; gradients and parameters travel as the same number of them.
    """

    def __init__(self, policy: Policy, rank: int, chunks: Sequence[int]) -> None:
        self.broadcast = LossMeter(0.0)
        """Of this rank's parameters, over all receivers."""
        self.gradients = [LossMeter(0.0) for _ in chunks]
        """Of this rank's gradients, at each owner."""
        self._policy = policy
        self._rank = rank
        self._chunks = chunks
        self._told = LossMeter(0.0, prior=0.0)

    @property
    def at_most(self) -> float:
        """The loss of the broadcast, for bounds: what was counted alone, as the prior makes it too small in the first
        steps; but no more than two standard errors above the measured one, as few chunks tell little.
        """
        value, (_, sent) = self.broadcast.value, self.broadcast.state
        _, counted = self._told.state
        above = value + 2.0 * math.sqrt(value * (1.0 - value) / sent)
        return min(self._told.value if counted else 0.0, above, rules.MOST_LOSS)

    def _count(self, lost: float, sent: float) -> None:
        self.broadcast.add(lost, sent)
        self._told.add(lost, sent)

    def hear(self, reports: Mapping[int, Report], *, guarded: bool, resent: tuple[float, float]) -> None:
        """Takes notice of one step.

        Args:
            reports: Of the others, about the step before.
            guarded: Whether the broadcast of that step was repaired because the guard wanted it so.
            resent: What that repair shows: chunks that were lost, of how many.
        """
        for peer, report in reports.items():
            if report.gradients_missing >= 0.0:
                chunks = self._chunks[peer]
                self.gradients[peer].add(report.gradients_missing * chunks, chunks)
        if guarded:
            self._first_pass(reports, resent)
            return
        told = [report.broadcast_missing for report in reports.values() if report.broadcast_missing >= 0.0]
        chunks = self._chunks[self._rank]
        self._count(sum(told) * chunks, len(told) * chunks)

    def _first_pass(self, reports: Mapping[int, Report], resent: tuple[float, float]) -> None:
        """What would have been lost. Gradients on the same links tell, unless they are repaired, too."""
        lost, sent = resent
        if self._policy.up.budget == 1.0:
            told = [(peer, each.gradients_missing) for peer, each in reports.items() if each.gradients_missing >= 0.0]
            lost = sum(missing * self._chunks[peer] for peer, missing in told)
            sent = sum(self._chunks[peer] for peer, _ in told)
        allowed = self._policy.down
        if allowed.deadline_s is None:
            lost = min(lost, allowed.budget * sent)  # as without the guard, it would be repaired down to that
        self._count(lost, sent)

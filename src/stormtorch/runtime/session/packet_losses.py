"""Measures how much of what one rank sends is lost, from the reports of the others at every step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from stormtorch.policies import rules
from stormtorch.policies.convergence_guard import LossMeter
from stormtorch.policies.policy import Policy
from stormtorch.runtime.handover.reports import Report


class PacketLosses:
    """Measures the losses of one sender from counts of chunks.

    Args:
        policy: Says what may be lost.
        rank: The rank that sends.
        chunks: Number of chunks in each owner's shards, the same for gradients and parameters.
    """

    def __init__(self, policy: Policy, rank: int, chunks: Sequence[int]) -> None:
        self.broadcast = LossMeter(0.0)
        """Loss of this rank's parameters, over all receivers."""
        self.gradients = [LossMeter(0.0) for _ in chunks]
        """Loss of this rank's gradients at each owner."""
        self.raw = LossMeter(0.0)
        """Loss of all that is not sent again, before parity brought any back."""
        self._redundancy_factor = 1.0
        self._policy = policy
        self._rank = rank
        self._chunks = chunks
        self._reported = LossMeter(0.0, prior=0.0)

    def inherit(self, before: PacketLosses) -> None:
        """Goes on from what was measured in an earlier view. Links may be others now; the broadcast is the same."""
        self.broadcast, self._reported, self.raw = before.broadcast, before._reported, before.raw

    @property
    def at_most(self) -> float:
        """Loss of the broadcast for bounds, without the prior, which makes it too small in the first steps.

        It is at most two standard errors above the measured loss, as few chunks tell little.
        """
        value, (_, sent) = self.broadcast.value, self.broadcast.state
        _, counted = self._reported.state
        above = value + 2.0 * math.sqrt(value * (1.0 - value) / sent)
        return min(self._reported.value if counted else 0.0, above, rules.MOST_LOSS)

    def translate(self, *, gradients: float, broadcast: float) -> None:
        """Makes what was counted tell of messages with another redundancy; see `LossMeter.translate`.

        Args:
            gradients: Factor by which the redundancy to come changes the loss of gradients, and
            broadcast: that of parameters.
        """
        most = self.raw.value
        if gradients != 1.0:
            for meter in self.gradients:
                meter.translate(gradients, most)
        if broadcast != 1.0:
            for meter in (self.broadcast, self._reported):
                meter.translate(broadcast, most)
        # The gradients of this step are told with the next, and went with the redundancy so far.
        self._redundancy_factor = gradients

    def _count(self, lost: float, sent: float) -> None:
        self.broadcast.add(lost, sent)
        self._reported.add(lost, sent)

    def receive_reports(
        self, reports: Mapping[int, Report], *, guarded: bool, retransmitted: tuple[float, float]
    ) -> None:
        """Counts the losses of one step.

        Args:
            reports: Reports of the others about the previous step.
            guarded: Whether the broadcast of that step was repaired because the guard demanded it.
            retransmitted: Chunks lost and sent in the first pass of that broadcast, as its repair shows them.
        """
        for peer, report in reports.items():
            if report.gradients_missing >= 0.0:
                chunks = self._chunks[peer]
                missing = min(report.gradients_missing * self._redundancy_factor, 1.0)
                self.gradients[peer].add(missing * chunks, chunks)
            if report.lost_before_parity >= 0.0:
                chunks = self._chunks[peer] + self._chunks[self._rank]
                self.raw.add(report.lost_before_parity * chunks, chunks)
        self._redundancy_factor = 1.0
        if guarded:
            self._first_pass(reports, retransmitted)
            return
        reported = [report.broadcast_missing for report in reports.values() if report.broadcast_missing >= 0.0]
        chunks = self._chunks[self._rank]
        self._count(sum(reported) * chunks, len(reported) * chunks)

    def _first_pass(self, reports: Mapping[int, Report], retransmitted: tuple[float, float]) -> None:
        """Counts what a repaired broadcast lost in its first pass: as much as gradients, if those are not repaired."""
        lost, sent = retransmitted
        if self._policy.up.budget == 1.0:
            reported = [
                (peer, each.gradients_missing) for peer, each in reports.items() if each.gradients_missing >= 0.0
            ]
            lost = sum(missing * self._chunks[peer] for peer, missing in reported)
            sent = sum(self._chunks[peer] for peer, _ in reported)
        allowed = self._policy.down
        if allowed.deadline_s is None:
            lost = min(lost, allowed.budget * sent)  # without the guard, it would be repaired down to the budget
        self._count(lost, sent)

"""Measures packet loss: the fraction of one rank's messages that is lost, from the receivers' reports at every step."""

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
        """Loss before parity recovered any chunks, of stages without retransmission."""
        self._redundancy_factor = 1.0
        self._policy = policy
        self._rank = rank
        self._chunks = chunks
        self._reported = LossMeter(0.0, prior=0.0)

    def inherit(self, before: PacketLosses) -> None:
        """Takes over measurements of an earlier view, except those per link, as members may have changed."""
        self.broadcast, self._reported, self.raw = before.broadcast, before._reported, before.raw

    @property
    def at_most(self) -> float:
        """Loss of the broadcast for bounds, without the prior, which would make it too small in the first steps.

        It is at most two standard errors above the loss with the prior, as a few chunks give a poor estimate.
        """
        value, (_, sent) = self.broadcast.value, self.broadcast.state
        _, counted = self._reported.state
        above = value + 2.0 * math.sqrt(value * (1.0 - value) / sent)
        return min(self._reported.value if counted else 0.0, above, rules.MOST_LOSS)

    def translate(self, *, gradients: float, broadcast: float) -> None:
        """Rescales the measured losses to the redundancy of the next messages; see `LossMeter.translate`.

        Args:
            gradients: Factor by which the new redundancy changes the loss of gradients.
            broadcast: Factor by which it changes the loss of parameters.
        """
        most = self.raw.value
        if gradients != 1.0:
            for meter in self.gradients:
                meter.translate(gradients, most)
        if broadcast != 1.0:
            for meter in (self.broadcast, self._reported):
                meter.translate(broadcast, most)
        # The next reports are about this step's gradients, which had the old redundancy.
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
            guarded: Whether the broadcast of that step was exact because the guard demanded it.
            retransmitted: Chunks lost and sent in the first pass of that broadcast, estimated from retransmissions.
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
        """Counts the loss of an exact broadcast's first pass: that of gradients, if those are not retransmitted."""
        lost, sent = retransmitted
        if self._policy.up.budget == 1.0:
            reported = [
                (peer, each.gradients_missing) for peer, each in reports.items() if each.gradients_missing >= 0.0
            ]
            lost = sum(missing * self._chunks[peer] for peer, missing in reported)
            sent = sum(self._chunks[peer] for peer, _ in reported)
        allowed = self._policy.down
        if allowed.deadline_s is None:
            lost = min(lost, allowed.budget * sent)  # without the guard, retransmission would stop at the budget
        self._count(lost, sent)

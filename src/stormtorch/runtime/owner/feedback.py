"""Reports between ranks under an `OwnerPolicy`, and their effects: packet loss, the guard, chunks to fetch exactly."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from stormtorch import theory
from stormtorch.policies import rules
from stormtorch.policies.convergence_guard import ConvergenceGuard
from stormtorch.policies.policy import OwnerPolicy, overrides
from stormtorch.runtime.handover.reports import Report, ShardReport
from stormtorch.runtime.memory.scaling import Scale
from stormtorch.runtime.owner.gradient_reduction import GradientReduction
from stormtorch.runtime.owner.parameter_broadcast import ParameterBroadcast
from stormtorch.runtime.owner.redundancy_control import RedundancyControl
from stormtorch.runtime.owner.shard_sizing import Speed
from stormtorch.runtime.session.round_reports import RoundReports
from stormtorch.telemetry.ledger import LedgerRow

Flags = list[list[torch.Tensor] | None]
"""Flags of chunks for each rank, bucket by bucket; None where a rank has none."""


class Feedback:
    """Makes one rank's reports, and learns from the reports that it receives.

    Args:
        policy: The user's policy.
        rounds: Measures losses and drift.
        reduction: Counts gradients that arrived; is given the losses of this rank's own gradients.
        broadcast: Counts parameters that arrived, and knows how old copies are.
        redundancy_control: Decides how much parity this rank sends.
        rank: This rank.
        ranks: Number of ranks.
    """

    def __init__(
        self,
        policy: OwnerPolicy,
        rounds: RoundReports,
        reduction: GradientReduction,
        broadcast: ParameterBroadcast,
        redundancy_control: RedundancyControl,
        rank: int,
        ranks: int,
    ) -> None:
        self.guarded = False
        """Whether the broadcast is exact because a rank's guard demands it."""
        self.lateness: Callable[[], tuple[float, float]] = lambda: (1.0, 0.0)
        """Returns this rank's `Report.given` and `took_s`: fraction of buckets that it contributes, and their time."""
        self._policy = policy
        self._round_reports = rounds
        self._reduction = reduction
        self._broadcast = broadcast
        self._redundancy_control = redundancy_control
        reduction.reliability = redundancy_control.up
        self._rank, self._ranks = rank, ranks
        self.speed: tuple[float, ...] = Speed()
        """Measured speed of this rank, for its reports."""
        self._guard = ConvergenceGuard(policy.guard, policy.max_lag)
        self._serve: list[torch.Tensor | None] = [None] * ranks
        self._fetch: list[torch.Tensor | None] = [None] * ranks
        self._last_exact = True
        # Whether the last broadcast has been reported: a step with several backwards must count it once.
        self._reported = True

    def report_to(
        self,
        peer: int,
        samples_S: torch.Tensor,
        used_P: torch.Tensor,
        not_finite: bool,
        settings: int,
        shard: ShardReport,
        scale: Scale,
    ) -> Report:
        """Makes the report to a peer: what arrived from it, and requests for chunks whose copies are too old.

        Args:
            peer: The rank that receives the report.
            samples_S: This rank's copies of the elements that all ranks compare.
            used_P: Whether each parameter has a gradient on this rank.
            not_finite: Whether this rank's gradients have an infinity or a NaN.
            settings: Digest of the optimizer's settings, 0 if they are not compared now.
            shard: Report on this rank's shard.
            scale: Loss scale of this rank's gradients.
        """
        nothing = self._last_exact or self._reported
        of_broadcast = None if nothing else self._broadcast.links.fraction(peer)
        of_gradients = self._reduction.links.fraction(peer)
        most = self._policy.max_lag
        wanted = torch.empty(0, dtype=torch.bool) if most is None else self._broadcast.would_exceed_lag(peer, most)
        self._fetch[peer] = wanted if most is not None and peer != self._rank else None
        return Report(
            not_finite,
            self._guard.alarm,
            -1.0 if of_broadcast is None else 1.0 - of_broadcast,
            -1.0 if of_gradients is None else 1.0 - of_gradients,
            self._round_reports.drift.update_variance,
            samples_S,
            used_P,
            wanted,
            settings,
            shard,
            self.speed,
            *self.lateness(),
            self._lost_before_parity(peer, broadcast=not nothing),
            scale,
        )

    def _lost_before_parity(self, peer: int, *, broadcast: bool) -> float:
        """Returns the fraction of a peer's chunks lost before parity recovered any; -1 if unknown.

        Stages with retransmission are left out: they do not show what was lost at first.
        """
        links = [self._reduction.links] if self._policy.up.budget == 1.0 else []
        if broadcast and self._policy.down.budget == 1.0:
            links.append(self._broadcast.links)
        if not links:
            return -1.0
        lost, chunks = (
            sum(each) for each in zip((0, 0), *(each.lost_before_parity(peer) for each in links), strict=True)
        )
        return lost / chunks if chunks else -1.0

    def learn(
        self, reports: dict[int, Report], row: LedgerRow, samples_S: torch.Tensor, lead: float, step: int
    ) -> None:
        """Learns from the reports of a step the loss of this rank's messages, and the drift between replicas.

        Args:
            reports: Report of each rank that sent one.
            row: Row of the step; receives losses, drift and its bounds.
            samples_S: This rank's copies of the elements that all ranks compare.
            lead: Updates by which the last broadcast was ahead.
            step: Number of the step.
        """
        policy, drift, losses = self._policy, self._round_reports.drift, self._round_reports.losses
        retransmitted = (0, 0) if self._reported else self._broadcast.retransmitted(row.missing)
        losses.receive_reports(reports, guarded=self.guarded, retransmitted=retransmitted)
        self._redundancy_control.choose(self._reduction.links)
        self._reduction.reliability = self._redundancy_control.up
        self._reduction.losses = [each.value for each in losses.gradients]
        guarded = self._guard.alarm or any(report.alarm for report in reports.values())
        if guarded != self.guarded:
            row.events.append("guard: the broadcast is exact" if guarded else "guard: the broadcast may lose again")
        self.guarded = guarded
        for peer in range(self._ranks):
            received = reports.get(peer)
            self._serve[peer] = received.wanted_C if received is not None and policy.max_lag else None
            if received is None:
                self._fetch[peer] = None
        row.loss = min(losses.broadcast.value, rules.MOST_LOSS)
        row.pair_drift, row.owner_drift = drift.compare(
            samples_S, {peer: report.samples_S for peer, report in reports.items()}
        )
        variances = [drift.update_variance, *(report.update_variance for report in reports.values())]
        variances = [each for each in variances if not math.isnan(each)]  # ranks that own nothing report NaN
        if step and drift.samples and variances:
            row.update_variance = sum(variances) / len(variances)
            lost = 0.0 if self._last_exact else losses.at_most
            # The bound holds for copies that are stale or new, not for what a user's policy makes of them.
            if not overrides(policy, "accept") and not overrides(policy, "publish"):
                row.pair_bound = drift.bound(row.update_variance, lost, lead, policy.max_lag, again=self._reported)
            row.published_bound = theory.pair_drift_published(lost) * row.update_variance
        self._reported = True

    def requests(self) -> tuple[Flags, Flags]:
        """Returns the chunks to send to each rank exactly, and those to receive so, and clears both requests."""
        split = self._broadcast.split
        serve = [None if each is None else split(each, self._rank) for each in self._serve]
        fetch = [None if each is None else split(each, owner) for owner, each in enumerate(self._fetch)]
        self._serve = [None] * self._ranks
        self._fetch = [None] * self._ranks
        return serve, fetch

    def broadcast_begins(self, *, exact: bool) -> None:
        """Called before every broadcast. The next reports say how much of it arrived, unless it is exact."""
        self._last_exact, self._reported = exact, False

    def watch(self, row: LedgerRow) -> None:
        """Gives the guard the loss of a broadcast's first pass, and the age of the oldest copy."""
        if not self._last_exact:
            self._redundancy_control.watch(self._broadcast.links)
        # Missing ranks are left out: an exact broadcast cannot recover what they would send.
        first_pass = self._broadcast.links.counts(row.missing)
        if row.guarded:
            # An exact broadcast loses nothing: use the loss of gradients, or retransmissions where those are exact too.
            lossy = self._policy.up.budget == 1.0
            first_pass = (
                self._reduction.links.counts(row.missing) if lossy else self._broadcast.retransmitted(row.missing)
            )
        self._guard.watch(*first_pass, self._broadcast.oldest(row.missing))

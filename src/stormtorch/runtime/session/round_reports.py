"""Reports that all ranks exchange in each round: packet loss, samples for drift, digests of optimizer settings.

All sessions use them, whatever their policy exchanges. They are set up again in every view, as members change.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from stormtorch.collectives import Group, Pending
from stormtorch.exchange.reliability import EXACT
from stormtorch.policies.policy import Policy
from stormtorch.runtime.handover.reports import Report, Reports
from stormtorch.runtime.members.barrier import Barrier
from stormtorch.runtime.members.hyperparameters import Hyperparameters
from stormtorch.runtime.memory.bucket import Bucket
from stormtorch.runtime.session.drift_samples import DriftSamples
from stormtorch.runtime.session.packet_losses import PacketLosses
from stormtorch.runtime.session.session import Session
from stormtorch.telemetry.ledger import LedgerRow

_log = logging.getLogger("stormtorch")


class RoundReports:
    """Sends and receives the reports of one session's rounds: one from every member to every other in each round.

    Args:
        session: The session.
        optimizer: The optimizer whose settings must agree.
        policy: The user's policy.
    """

    def __init__(self, session: Session, optimizer: torch.optim.Optimizer, policy: Policy) -> None:
        self._session = session
        self._policy = policy
        self.hyperparameters = Hyperparameters(optimizer, policy.settings)
        self.members_group: Group
        """The members of the view."""
        self.drift: DriftSamples
        self.losses: PacketLosses
        self._reports: Reports

    def agree(self) -> None:
        """Compares the optimizer's settings of all ranks at the start of the job."""
        if self.hyperparameters.compared:
            group = self._session.channel("begin/settings", interruptible=True)
            self.hyperparameters.agree(group, self._session.labels(), "at prepare()")

    def begin_view(self, buckets: Sequence[Bucket]) -> None:
        """Begins a view, for which the buckets have been partitioned."""
        self._buckets = buckets
        self.members_group = self._session.channel("here")
        self.drift = DriftSamples(buckets, self.members_group.size, self.members_group.rank, self._policy.drift_samples)
        self.drift.choose(self._session.steps)

    def open(self, chunks: Sequence[int], wanted: Sequence[int]) -> None:
        """Allocates memory for reports.

        Args:
            chunks: Number of chunks in each owner's shards.
            wanted: How many of each owner's chunks a report may request.
        """
        before = getattr(self, "losses", None)
        self.losses = PacketLosses(self._policy, self.members_group.rank, chunks)
        if before is not None:
            self.losses.inherit(before)
        group = self._session.round_channel("reports")
        self._reports = Reports(group, EXACT, len(self._session.parameters), self.drift.samples, wanted)

    def channels(self, name: str, *, interruptible: bool = False) -> list[Group]:
        """Returns one channel per bucket, so that buckets may start in any order."""
        return [
            self._session.channel(f"{name}/{bucket.index}", interruptible=interruptible) for bucket in self._buckets
        ]

    def barrier(self) -> Barrier:
        """Returns the barrier for calls that all ranks make."""
        calls, exact = (self._session.channel(name, interruptible=True) for name in ("calls", "exact"))
        return Barrier(calls, exact, EXACT, self._policy.collective_wait_s)

    # --- a round -----------------------------------------------------------------------------------------------------

    def send_reports(self, step: int, report_to: Callable[[int], Report]) -> Pending:
        """Begins to send a report to every other member."""
        members_group = self.members_group
        return self._reports.begin(
            step, [None if peer == members_group.rank else report_to(peer) for peer in range(members_group.size)]
        )

    def peers_waiting(self) -> list[int]:
        """Returns the members that have begun the next round, which this rank has not, by their reports."""
        return [peer for peer, _ in self._reports.group.posted_by_peers()]

    def receive_reports(self, pending_reports: Pending, row: LedgerRow, step: int, digest: int) -> dict[int, Report]:
        """Waits for the reports of a round, and returns those of all other live members.

        Args:
            pending_reports: What `send_reports` returned.
            row: Row of the round; receives the ranks that are missing, and events.
            step: Number of the step.
            digest: Digest of this rank's optimizer settings, 0 if they are not compared now.

        Raises:
            Interrupted: Another view begins with this round.
        """
        pending_reports.wait()
        found = {
            peer: self._reports.read(peer) for peer in range(self.members_group.size) if peer != self.members_group.rank
        }
        reports = {peer: report for peer, report in found.items() if report is not None}
        row.missing = [
            self._session.label(rank) for rank in self._session.group.ranks if rank not in self.members_group.ranks
        ]
        since = step - self._session.view.step
        if row.missing and since and since % self._policy.warn_every == 0:
            _log.warning(
                "rank %d: rank %s is still missing at step %d: training goes on with %d rank%s",
                *(self._session.label(self.members_group.transport.rank), ", ".join(map(str, row.missing)), step),
                *(self.members_group.size, "s" * (self.members_group.size > 1)),
            )
        if len({digest, *(report.settings for report in reports.values())} - {0}) > 1:
            # Every rank sees that digests differ, so all take part in comparing the settings.
            group = self._session.round_channel("settings")
            row.events += self.hyperparameters.agree(group, self._session.labels(), f"at step {step}")
        return reports

"""What ranks tell each other alongside an exchange: who is there, what was lost, how far apart replicas are.

All sessions share this, whatever their policy exchanges: channels with new names in every epoch, reports, optimizer
settings that must agree, ranks that fall silent, and ranks that return.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from stormtorch.collectives import Group, Pending
from stormtorch.policies.ledger import Row
from stormtorch.policies.policy import Policy
from stormtorch.reliability import EXACT, REPAIRED
from stormtorch.runtime.bucket import Bucket
from stormtorch.runtime.drift_samples import DriftSamples
from stormtorch.runtime.hyperparameters import Hyperparameters
from stormtorch.runtime.losses import Losses
from stormtorch.runtime.meeting import Meeting
from stormtorch.runtime.members import WITHOUT_OWNER, Epoch, Members
from stormtorch.runtime.reports import Report, Reports


class Rounds:
    """The rounds of one session: each is an exchange, with a report from every rank to every other.

    Args:
        group: All ranks.
        name: Name of the session, the first part of the names of its channels.
        subgroup: Makes a group of all ranks with a sequence of exchanges of its own.
        optimizer: The optimizer whose settings must agree.
        policy: The user's policy.
        buckets: Buckets that hold the parameters.
        parameters: Number of parameters of the optimizer.
        every: Steps from one round to the next.
        without: What is missing with a rank, in words for a warning.
    """

    def __init__(
        self,
        group: Group,
        name: str,
        subgroup: Callable[[str], Group],
        optimizer: torch.optim.Optimizer,
        policy: Policy,
        buckets: Sequence[Bucket],
        parameters: int,
        *,
        every: int = 1,
        without: str = WITHOUT_OWNER,
    ) -> None:
        self._group = group
        self._subgroup = subgroup
        self._policy = policy
        self._buckets = buckets
        self._parameters = parameters
        self.members = Members(group, name, policy.warn_every, policy.give_up_s, every=every, without=without)
        self.hyperparameters = Hyperparameters(optimizer, policy.settings)
        # If both stages are exact, a rank that dies ends the job; otherwise the others continue without it.
        self.certain = EXACT if policy.up.exact and policy.down.exact else REPAIRED
        """Reliability of messages that must arrive."""
        self.drift = DriftSamples(buckets, group.size, group.rank, policy.drift_samples)
        self.drift.choose(0)
        self.losses: Losses
        self._reports: Reports

    def agree(self) -> None:
        """Compares the optimizer's settings when all ranks begin together."""
        if self.hyperparameters.compared:
            self.hyperparameters.agree(self._subgroup("begin"), range(self._group.size), "at prepare()")

    def open(self, chunks: Sequence[int], wanted: Sequence[int]) -> None:
        """Allocates memory for reports.

        Args:
            chunks: Number of chunks in each owner's shards.
            wanted: How many of each owner's chunks a report may ask for.
        """
        self.losses = Losses(self._policy, self._group.rank, chunks)
        samples = self.drift.samples
        self._reports = Reports(self.channel("reports"), self.certain, self._parameters, samples, wanted)

    # --- channels, which have other names in every epoch -------------------------------------------------------------

    def channel(self, name: str, members: Sequence[int] | None = None) -> Group:
        """Returns a group with a sequence of exchanges in this epoch, of all ranks or of some."""
        all_ranks = self._subgroup(f"{self.members.epoch}/{name}")
        if members is None:
            return all_ranks
        return Group(all_ranks.transport, [all_ranks.ranks[each] for each in members], name=all_ranks.name)

    def channels(self, name: str) -> list[Group]:
        """Returns one channel per bucket, so that buckets may start in any order."""
        return [self.channel(f"{name}/{bucket.index}") for bucket in self._buckets]

    def meeting(self) -> Meeting:
        """Returns the place where ranks meet for calls that all of them make."""
        return Meeting(self.channel("calls"), self.channel("exact"), self.certain, self._policy.collective_wait_s)

    # --- a round -----------------------------------------------------------------------------------------------------

    def tell(self, step: int, report_to: Callable[[int], Report]) -> Pending:
        """Begins to send a report to every rank."""
        return self._reports.begin(step, [report_to(peer) for peer in range(self._group.size)])

    def hear(self, telling: Pending, row: Row, step: int, digest: int) -> dict[int, Report] | None:
        """Waits for the reports of a round. Returns None if this rank is cut off from the others.

        Args:
            telling: What `tell` returned.
            row: Row of the round; gets the missing ranks and the events.
            step: Number of the step.
            digest: Digest of this rank's optimizer settings, 0 if they are not compared now.
        """
        telling.wait()
        everyone = range(self._group.size)
        found = {peer: self._reports.read(peer) for peer in everyone if peer != self._group.rank}
        reports = {peer: report for peer, report in found.items() if report is not None}
        row.missing = self.members.hear(set(reports), step, row.events)
        if self.members.cut_off:
            return None
        if len({digest, *(report.settings for report in reports.values())} - {0}) > 1:
            # Every rank has seen that digests differ, so the ranks that are here compare their settings.
            here = [peer for peer in everyone if peer not in row.missing]
            row.events += self.hyperparameters.agree(self.channel("settings", here), here, f"at step {step}")
        return reports

    # --- ranks that return -------------------------------------------------------------------------------------------

    def enter(self, epoch: Epoch) -> None:
        """Begins an epoch, in which all channels have new names."""
        self.members.begin(epoch)
        self._reports.group = self.channel("reports")

    def hand_settings(self, epoch: Epoch, new: Sequence[int]) -> None:
        """Gives new processes the optimizer settings of the epoch's root."""
        # On a channel of its own: if a rank dies now, the others may stop at different points of it.
        group = self.channel("settings/handed", epoch.members)
        self.hyperparameters.take(group, epoch.members.index(epoch.root), new=self._group.rank in new)

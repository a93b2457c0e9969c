"""What ranks tell each other beside an exchange: who is there, what was lost, how far apart replicas are.

All sessions have this in common, whatever their policy exchanges: names of channels that change with every epoch,
reports, settings of the optimizer that must agree, ranks that fall silent, and ranks that return.
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
        optimizer: Whose settings must agree.
        policy: The user's.
        buckets: Where the parameters are.
        parameters: How many parameters the optimizer has.
        every: Steps from one round to the next.
        without: What training goes on without where a rank is missing.
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
        # Where both stages are exact, a rank that is lost ends the job; otherwise the others go on without it.
        self.certain = EXACT if policy.up.exact and policy.down.exact else REPAIRED
        """Reliability of all that must arrive."""
        self.drift = DriftSamples(buckets, group.size, group.rank, policy.drift_samples)
        self.drift.choose(0)
        self.losses: Losses
        self._reports: Reports

    def agree(self) -> None:
        """Compares the optimizer's settings when all ranks begin together."""
        if self.hyperparameters.compared:
            self.hyperparameters.agree(self._subgroup("begin"), range(self._group.size), "at prepare()")

    def open(self, chunks: Sequence[int], wanted: Sequence[int]) -> None:
        """Makes room for reports.

        Args:
            chunks: How many chunks each owner's shards have.
            wanted: How many of them a report may ask for.
        """
        self.losses = Losses(self._policy, self._group.rank, chunks)
        samples = self.drift.samples
        self._reports = Reports(self.channel("reports"), self.certain, self._parameters, samples, wanted)

    # --- channels, which have other names in every epoch -------------------------------------------------------------

    def channel(self, name: str, members: Sequence[int] | None = None) -> Group:
        """A sequence of exchanges of this epoch, between all ranks or some of them."""
        all_ranks = self._subgroup(f"{self.members.epoch}/{name}")
        if members is None:
            return all_ranks
        return Group(all_ranks.transport, [all_ranks.ranks[each] for each in members], name=all_ranks.name)

    def channels(self, name: str) -> list[Group]:
        """One sequence per bucket, so that buckets may start in any order."""
        return [self.channel(f"{name}/{bucket.index}") for bucket in self._buckets]

    def meeting(self) -> Meeting:
        """Where ranks meet for calls that all of them make."""
        return Meeting(self.channel("calls"), self.channel("exact"), self.certain, self._policy.collective_wait_s)

    # --- a round -----------------------------------------------------------------------------------------------------

    def tell(self, step: int, report_to: Callable[[int], Report]) -> Pending:
        """Begins to send a report to every rank."""
        return self._reports.begin(step, [report_to(peer) for peer in range(self._group.size)])

    def hear(self, telling: Pending, row: Row, step: int, digest: int) -> dict[int, Report] | None:
        """Waits for the reports of a round; None if this rank is cut off from the others.

        Args:
            telling: What `tell` returned.
            row: Is told who is missing, and what happened.
            step: The step of this round.
            digest: Digest of this rank's settings, 0 if they are not compared now.
        """
        telling.wait()
        everyone = range(self._group.size)
        found = {peer: self._reports.read(peer) for peer in everyone if peer != self._group.rank}
        reports = {peer: report for peer, report in found.items() if report is not None}
        row.missing = self.members.hear(set(reports), step, row.events)
        if self.members.cut_off:
            return None
        if len({digest, *(report.settings for report in reports.values())} - {0}) > 1:
            # Where optimizers are set otherwise, those that are here say how; all of them know of it.
            here = [peer for peer in everyone if peer not in row.missing]
            row.events += self.hyperparameters.agree(self.channel("settings", here), here, f"at step {step}")
        return reports

    # --- ranks that return -------------------------------------------------------------------------------------------

    def enter(self, epoch: Epoch) -> None:
        """Begins an epoch: all that follows has new names."""
        self.members.begin(epoch)
        self._reports.group = self.channel("reports")

    def hand_settings(self, epoch: Epoch, new: Sequence[int]) -> None:
        """New processes take the settings of the optimizer from those that were there."""
        # On a channel of its own: where a rank dies now, the others may have come to different points of it.
        group = self.channel("settings/handed", epoch.members)
        self.hyperparameters.take(group, epoch.members.index(epoch.root), new=self._group.rank in new)

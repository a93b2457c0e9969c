"""Partitions a session's parameters into shards: for this view, for the next one, and when to request resharding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from stormtorch.collectives.wire import element_bytes, narrower
from stormtorch.policies.policy import OwnerPolicy
from stormtorch.runtime.handover.moves import Partition
from stormtorch.runtime.handover.reports import Report
from stormtorch.runtime.handover.transition import Handshake
from stormtorch.runtime.memory.bucket import Bucket
from stormtorch.runtime.memory.layout import Layout, repartition
from stormtorch.runtime.owner.feedback import Feedback
from stormtorch.runtime.owner.shard_sizing import (
    ShardSizes,
    ShardSizing,
    SpeedMeter,
    describe_sizes,
    indices_by_machine,
    parse_speed,
    received_speed,
)
from stormtorch.runtime.session.session import Session
from stormtorch.telemetry.ledger import LedgerRow


class Partitioner:
    """Partitions the parameters of one session into shards, whose sizes follow the policy's `shards`.

    Args:
        session: The session.
        policy: The user's policy.
        buckets: Buckets that hold the parameters.
        standbys: Number of standbys of each shard.
        whole: Whether a shard must consist of whole parameters.
        by_machines: Returns whether exchanges are hierarchical where the layout of machines allows it.
    """

    def __init__(
        self,
        session: Session,
        policy: OwnerPolicy,
        buckets: Sequence[Bucket],
        standbys: int,
        *,
        whole: bool,
        by_machines: Callable[[], bool],
    ) -> None:
        self._session = session
        self._buckets = buckets
        self._standbys = standbys
        self._whole = whole
        self._by_machines = by_machines
        self._planned = [bucket.layout for bucket in buckets]
        size = sum(each.layout.elements * element_bytes(narrower(policy.wire, each.dtype)) for each in buckets)
        self._sizing = ShardSizing(policy, size, standbys, session.owners_at_start, session.label)
        transport = session.group.transport
        self._meter = SpeedMeter(transport.take_bottleneck_peaks) if self._sizing.measured else None
        # On a GPU, the optimizer may still run after `step` has returned, so its time is not known.
        self._timed = not any(bucket.on_gpu for bucket in buckets)
        self.now: Partition
        """The partition of the current view."""

    def first(self, members: Sequence[int]) -> Partition:
        """Returns the partition with which a job begins."""
        self.now = self.partition_for(members, self._sizing.at_start(members))
        return self.now

    def partition_for(self, members: Sequence[int], parts: ShardSizes | None) -> Partition:
        """Returns how the members of a view divide the parameters.

        Args:
            members: Ranks of the view.
            parts: Their shares, in units of 1 / `layout.SHARE_UNITS`; None means equal shares.
        """
        count = len(members)
        layouts: Sequence[Layout] = self._planned
        if parts is not None or count != self._session.owners_at_start:
            layouts = [
                repartition(
                    layout, each.dtype.itemsize, count, whole=self._whole, first_owner=each.index % count, parts=parts
                )
                for layout, each in zip(self._planned, self._buckets, strict=True)
            ]
        return Partition(tuple(members), layouts, self._standbys, parts)

    # --- a view begins ------------------------------------------------------------------------------------------------

    @property
    def speed(self) -> Sequence[float]:
        """Speed that this rank reports when a view begins; empty if it is not measured."""
        return () if self._meter is None else self._meter.speed

    def change(self, handshake: Handshake, members: Sequence[int]) -> tuple[Partition, Partition]:
        """Returns the partition of the view before, and that of the view that begins."""
        before = self.partition_for(handshake.members_before, handshake.parts_before)
        shares = {rank: before.share(place) for place, rank in enumerate(before.members)}
        speeds = {rank: received_speed(each) for rank, each in handshake.reported.items()}
        parts = self._sizing.decide(members, speeds, shares, self._machines(members, handshake.machines))
        return before, self.partition_for(members, parts)

    def _machines(self, members: Sequence[int], machines: Mapping[int, str]) -> list[list[int]]:
        return indices_by_machine(members, machines, hierarchy=self._by_machines())

    def reported(self, before: Partition) -> list[str]:
        """Describes how shares have changed with the view; empty if they have not."""
        if self.now.parts == before.parts:
            return []
        return [describe_sizes(self.now.parts, self._session.labels())]

    # --- a step -------------------------------------------------------------------------------------------------------

    @property
    def share(self) -> float:
        """Fraction of the parameters that this rank owns."""
        return self.now.share(self.now.members.index(self._session.group.transport.rank))

    def measure(self, feedback: Feedback) -> None:
        """Measures this rank's speed, for its reports of this round."""
        if self._meter is not None:
            feedback.speed = self._meter.read()

    def receive_reports(self, reports: Mapping[int, Report], row: LedgerRow) -> None:
        """Takes the speeds of all members. The lowest member requests a view with other shares if they are worth it."""
        row.share = self.share
        session, members = self._session, self.now.members
        if self._meter is None or session.group.transport.rank != members[0] or len(reports) < len(members) - 1:
            return
        speeds = [self._meter.speed, *(parse_speed(reports[place].speed) for place in range(1, len(members)))]
        machines = self._machines(members, session.machines)
        if self._sizing.pays(speeds, self.now.parts, machines, session.steps, session.view.step):
            row.events.append("other shares should make steps shorter: requests a view with the same ranks")
            session.group.transport.request_view()

    def step_begins(self) -> None:
        """Called before the user's optimizer steps."""
        if self._meter is not None and self._timed:
            self._meter.step_begins()

    def step_ends(self) -> None:
        """Called after the user's optimizer has stepped."""
        if self._meter is not None:
            self._meter.step_ends(self.share, len(self.now.members))

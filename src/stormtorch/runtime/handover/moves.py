"""Plans resharding when ranks join or leave: which rank sends which range to which. Numbers only, same on all ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from stormtorch.runtime.handover.standby import standby_of
from stormtorch.runtime.memory.layout import SHARE_UNITS, Layout


class MoveSource(IntEnum):
    """What a rank sends of a range: its state as owner or as standby, or only its copy of the parameters."""

    OWNER = 0
    STANDBY = 1
    COPY = 2


@dataclass(frozen=True, slots=True)
class Partition:
    """How a view divides the parameters among its members."""

    members: tuple[int, ...]
    layouts: Sequence[Layout]
    standbys: int
    parts: tuple[int, ...] | None = None
    """Share of each member, in units of 1/`layout.SHARE_UNITS`; None for equal shares."""

    def share(self, place: int) -> float:
        """Returns the fraction of the parameters that a member owns."""
        return 1.0 / len(self.members) if self.parts is None else self.parts[place] / SHARE_UNITS

    def standby(self, shard: int) -> int | None:
        """Returns the rank of a shard's standby, if it has one."""
        place = standby_of(shard, len(self.members), self.standbys)
        return None if place is None else self.members[place]


@dataclass(frozen=True, slots=True)
class Move:
    """A range of a bucket that one rank sends to another, or keeps."""

    bucket: int
    first: int
    count: int
    sender: int
    source: MoveSource
    shard: int
    """Number of the shard before the view change."""
    receiver: int
    as_standby: bool
    """Whether the receiver gets it as a standby, not as the owner."""


def plan_moves(
    before: Partition, after: Partition, holders: Collection[int], equal: Collection[int], freshest: Mapping[int, int]
) -> list[Move]:
    """Plans all moves from one view to another.

    The owner of a range sends or keeps it. A standby that equals its owner keeps its state, and sends it if the owner
    is gone. If both are gone, the rank with the freshest copy of the parameters sends that copy, and the optimizer's
    state of the range is lost.

    Args:
        before: Partition of the view that the ranks come from.
        after: Partition of the view that begins.
        holders: Ranks that still have their state of the former view.
        equal: Shards of the former view whose standby has the same values and state as their owner.
        freshest: Rank with the freshest copy of each shard whose owner and standby are both gone.
    """
    moves = []
    for bucket, (old, new) in enumerate(zip(before.layouts, after.layouts, strict=True)):
        for shard, (first, count) in enumerate(new.spans):
            takers = [(after.members[shard], False)]
            standby = after.standby(shard)
            if standby is not None:
                takers.append((standby, True))
            for old_shard, (old_first, old_count) in enumerate(old.spans):
                begin, end = max(first, old_first), min(first + count, old_first + old_count)
                if begin >= end:
                    continue
                for receiver, as_standby in takers:
                    sender, source = _sender_of(before, old_shard, receiver, holders, equal, freshest)
                    moves.append(Move(bucket, begin, end - begin, sender, source, old_shard, receiver, as_standby))
    return moves


def _sender_of(
    before: Partition,
    shard: int,
    receiver: int,
    holders: Collection[int],
    equal: Collection[int],
    freshest: Mapping[int, int],
) -> tuple[int, MoveSource]:
    owner, standby = before.members[shard], before.standby(shard)
    if owner in holders and not (receiver == standby and shard in equal):
        return owner, MoveSource.OWNER
    if standby is not None and standby in holders:
        return standby, MoveSource.STANDBY
    return freshest[shard], MoveSource.COPY


def orphans(before: Partition, holders: Collection[int]) -> list[int]:
    """Returns the shards whose owner and standby are both gone."""
    return [
        shard
        for shard, owner in enumerate(before.members)
        if owner not in holders and before.standby(shard) not in holders
    ]

"""Resharding at a view change under an `OwnerPolicy`: repartitions shards and moves them with the optimizer's state.

All members and all leaving ranks take part. Each rank retains its former state until every member is known to have its
new one: if another view begins meanwhile, all continue from the retained state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stormtorch.collectives import Group
from stormtorch.collectives.base import objects
from stormtorch.errors import StormError
from stormtorch.runtime.handover.moves import Move, MoveSource, Partition, orphans, plan_moves
from stormtorch.runtime.memory import fingerprints
from stormtorch.runtime.memory.bucket import Bucket
from stormtorch.runtime.memory.layout import Layout, Piece
from stormtorch.runtime.memory.shard_state import ShardRecord, ShardState, State, build


@dataclass
class RetainedShards:
    """State of a rank in one view: its own shard, and the shard that it follows as a standby."""

    partition: Partition
    own: ShardState | None
    """None on a rank without a shard, such as one that leaves."""
    followed: ShardState | None
    ages: Sequence[int]
    """Age of its oldest copy of each shard."""
    behind: bool = False
    """Whether it missed an update of the owner that it follows."""
    differs: bool = False
    """Whether the shard that it follows is known to differ from the owner's."""
    older: bool = False
    """Whether its copies are too old to show changes by the program, since the last step, to the shard it follows."""
    changes: bool = False
    """Whether it has seen the program change parameters outside steps."""


@dataclass(frozen=True)
class Handshake:
    """What the ranks report to each other when a view begins."""

    holders: dict[int, dict[str, Any]]
    """Reports of the ranks that have state of the base view, by rank."""
    reported: dict[int, dict[str, Any]]
    """Reports of all ranks, by rank."""

    @property
    def members_before(self) -> list[int]:
        """Members of the base view, from which all ranks come."""
        return list(self.holders[min(self.holders)]["members"])

    def sender(self, members: Sequence[int]) -> int:
        """Returns the member that sends settings and buffers to joining ranks: the lowest one that has state.

        If only leaving ranks have state, joining ranks keep their own, and the lowest member's settings win.
        """
        return min((rank for rank in members if rank in self.holders), default=members[0])

    @property
    def parts_before(self) -> tuple[int, ...] | None:
        """Shares of the members of the base view; None for equal shares."""
        reported = self.holders[min(self.holders)]["parts"]
        return None if reported is None else tuple(int(each) for each in reported)

    @property
    def steps(self) -> int:
        """Optimizer steps so far."""
        return max(int(each["steps"]) for each in self.holders.values())

    @property
    def machines(self) -> dict[int, str]:
        """Identity of the machine of each rank, by rank."""
        return {rank: str(each["machine"]) for rank, each in self.reported.items()}

    @property
    def open(self) -> bool:
        """Whether ranks can join: all ranks with state are where an iteration begins."""
        return all(bool(each["open"]) for each in self.holders.values())

    @property
    def moves(self) -> int:
        """How often methods of the optimizers have changed shards outside steps, on the rank with the fewest."""
        return min(int(each["moves"]) for each in self.holders.values())

    def newcomers(self, members: Sequence[int]) -> list[int]:
        """Returns the members that have no state yet."""
        return [rank for rank in members if rank not in self.holders]


def exchange_handshakes(
    group: Group,
    held: RetainedShards | None,
    steps: int,
    carried: dict[str, str],
    machine: str,
    speed: Sequence[float] = (),
    *,
    moves: int = 0,
    open_: bool = True,
) -> Handshake:
    """Reports this rank's state to all ranks, and gathers their reports.

    Args:
        group: All ranks that take part.
        held: This rank's state in the base view; None if it has none.
        steps: Optimizer steps of this rank so far.
        carried: Other values that this rank reports.
        machine: Machine of this rank; empty if it does not exchange by machines, so that no rank does.
        speed: Measured speed of this rank; empty if shares do not depend on it.
        moves: How often methods of this rank's optimizer have changed its shards outside steps.
        open_: Whether joining ranks could continue with this rank from here.

    Raises:
        Interrupted: A rank is gone, and another view begins without it.
        StormError: No rank has any state.
    """
    own = {
        "holds": held is not None,
        "behind": held is not None and held.behind,
        "differs": held is not None and held.differs,
        "older": held is not None and held.older,
        "changes": held is not None and held.changes,
        "own": _fingerprint(None if held is None else held.own),
        "followed": _fingerprint(None if held is None else held.followed),
        "members": [] if held is None else list(held.partition.members),
        "parts": None if held is None or held.partition.parts is None else list(held.partition.parts),
        "speed": list(speed),
        "steps": steps,
        "ages": [] if held is None else list(held.ages),
        "carried": carried,
        "machine": machine,
        "open": open_,
        "moves": moves,
    }
    reported = dict(zip(group.ranks, objects.gather(own, group), strict=True))
    holders = {rank: each for rank, each in reported.items() if each["holds"]}
    if not holders:
        raise StormError(
            f"rank {group.transport.rank}: no rank of {', '.join(map(str, group.ranks))} still has the parameters: "
            "restart the job from a checkpoint"
        )
    return Handshake(holders, reported)


def _fingerprint(shard_state: ShardState | None) -> list[int]:
    return [] if shard_state is None else list(fingerprints.of_shard_state(shard_state))


@dataclass
class MoveResult:
    """What a rank has received for a view, before it is in use."""

    masters: list[torch.Tensor]
    """Float32 values of its shard, by bucket."""
    states: dict[tuple[int, Piece], State]
    followed: ShardState | None
    lost: list[int]
    """Shards of the former view whose optimizer state is lost."""
    late: list[int]
    """Shards of the former view whose last update is lost: the owner died before its standby received it."""
    unequal: list[int]
    """Shards of the former view that continue from a standby that is known to differ from the owner."""


def move(
    group: Group,
    handshake: Handshake,
    before: Partition,
    after: Partition,
    held: RetainedShards | None,
    buckets: Sequence[Bucket],
    *,
    whole: bool,
) -> MoveResult:
    """Moves shards from one view to another. All ranks take part.

    Args:
        group: All ranks that take part.
        handshake: What they have reported to each other.
        before: Partition of the view that they come from.
        after: Partition of the view that begins.
        held: This rank's state of the former view.
        buckets: Buckets that hold the parameters.
        whole: Whether pieces are whole parameters.

    Raises:
        Interrupted: A rank is gone, and another view begins without it.
    """
    rank = group.transport.rank
    lost = orphans(before, handshake.holders)
    freshest = {
        shard: min(handshake.holders, key=lambda each: (handshake.holders[each]["ages"][shard], each)) for shard in lost
    }
    holders = handshake.holders
    late, unequal, equal = [], [], []
    # Changes that any rank has seen count: a standby may be one step old, and own nothing that the program changes.
    changes = any(each["changes"] for each in holders.values())
    for shard, owner in enumerate(before.members):
        standby = before.standby(shard)
        if standby is None or standby not in holders:
            continue
        if owner in holders:
            equal += [shard] if holders[owner]["own"] == holders[standby]["followed"] else []
        else:
            late += [shard] if holders[standby]["behind"] else []
            unequal += [shard] if holders[standby]["differs"] or (changes and holders[standby]["older"]) else []
    moves = plan_moves(before, after, holders, equal, freshest)
    mine: dict[bool, list[ShardRecord]] = {False: [], True: []}
    for each in moves:
        if each.sender == rank and each.receiver == rank:
            mine[each.as_standby] += _records(each, held, buckets, whole=whole)
    messages = []
    for peer in group.ranks:
        given = [
            (each.as_standby, [record.packed() for record in _records(each, held, buckets, whole=whole)])
            for each in moves
            if each.sender == rank and each.receiver == peer != rank
        ]
        messages.append(objects.pack(given) if given else torch.empty(0, dtype=torch.uint8))
    for message in objects.exchange(messages, group):
        for as_standby, records in objects.unpack(message) if message.numel() else ():
            mine[bool(as_standby)] += [ShardRecord(*each) for each in records]
    # If part of a parameter has lost its state, drop all of it: an optimizer has one step count per parameter.
    state_lost = {
        slot.parameter
        for each in moves
        if each.source is MoveSource.COPY
        for slot in buckets[each.bucket].layout.slots
        if slot.first < each.first + each.count and each.first < slot.first + slot.count
    }
    for records in mine.values():
        records[:] = [record._replace(state={}) if record.parameter in state_lost else record for record in records]
    if rank not in after.members:
        return MoveResult([], {}, None, lost, late, unequal)
    place = after.members.index(rank)
    masters, states = build(place, after.layouts, mine[False], buckets, whole=whole)
    follows = None
    for shard in range(len(after.members)):
        if after.standby(shard) == rank:
            follows = _shard_state(shard, after.layouts, *build(shard, after.layouts, mine[True], buckets, whole=whole))
    return MoveResult(masters, states, follows, lost, late, unequal)


def _shard_state(
    shard: int, layouts: Sequence[Layout], masters: list[torch.Tensor], states: dict[tuple[int, Piece], State]
) -> ShardState:
    return ShardState(shard, layouts, masters, lambda bucket, piece: states[bucket, piece])


def _records(move: Move, held: RetainedShards | None, buckets: Sequence[Bucket], *, whole: bool) -> list[ShardRecord]:
    where = move.bucket, move.first, move.count
    if move.source is MoveSource.COPY:
        layout = buckets[move.bucket].layout
        return [
            ShardRecord(slot.parameter, low - slot.first, high - low, buckets[move.bucket].flat[low:high].float(), {})
            for slot in layout.slots
            if (low := max(slot.first, move.first)) < (high := min(slot.first + slot.count, move.first + move.count))
        ]
    assert held is not None
    shard_state = held.own if move.source is MoveSource.OWNER else held.followed
    assert shard_state is not None
    return shard_state.partition(*where, whole=whole)

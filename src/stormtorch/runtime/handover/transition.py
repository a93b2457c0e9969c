"""The beginning of a view under an `OwnerPolicy`: shards are cut anew, and move with the optimizer's state.

All members take part, and ranks that leave. Until every member is known to have what it needs, each keeps what it had
before: if yet another view comes meanwhile, all go on from there.
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
    """What a rank has in one view: its own shard, and the one that it follows as a standby."""

    partition: Partition
    own: ShardState | None
    """None on a rank that holds nothing, such as one that leaves."""
    followed: ShardState | None
    ages: Sequence[int]
    """Age of the oldest copy that it has of each shard."""
    behind: bool = False
    """Whether it lacks an update of the owner that it follows."""
    differs: bool = False
    """Whether the shard that it follows is known to differ from the owner's."""
    older: bool = False
    """Whether it cannot see what the program may have changed of the shard that it follows since the last step."""
    changes: bool = False
    """Whether it has seen the program change parameters beside steps."""


@dataclass(frozen=True)
class Handshake:
    """What the ranks have told each other when a view begins."""

    holders: dict[int, dict[str, Any]]
    """What each rank has told, by rank, of those that hold a part of the base."""
    reported: dict[int, dict[str, Any]]
    """What each rank has told, by rank."""

    @property
    def members_before(self) -> list[int]:
        """Members of the view that all come from."""
        return list(self.holders[min(self.holders)]["members"])

    def sender(self, members: Sequence[int]) -> int:
        """Returns the member that gives newcomers settings and buffers: the lowest one that holds a part.

        Where only ranks that leave hold one, newcomers keep their own, and the lowest member's settings count.
        """
        return min((rank for rank in members if rank in self.holders), default=members[0])

    @property
    def parts_before(self) -> tuple[int, ...] | None:
        """Shares of the members of the view that all come from; None is equal ones."""
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
        """Whether newcomers can come in: all who hold something are where a turn begins."""
        return all(bool(each["open"]) for each in self.holders.values())

    @property
    def moves(self) -> int:
        """How often methods of the optimizers have moved shards outside steps, on the rank that is behind."""
        return min(int(each["moves"]) for each in self.holders.values())

    def newcomers(self, members: Sequence[int]) -> list[int]:
        """Returns the members that hold nothing yet."""
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
    """Tells all ranks what this one holds, and learns what they hold.

    Args:
        group: All ranks that take part.
        held: What this rank has of the view that all come from; None if it has nothing of it.
        steps: Optimizer steps of this rank so far.
        carried: What else this rank has to tell.
        machine: Machine of this rank; empty if it does not exchange by machines, so that nobody does.
        speed: Measured speed of this rank; empty if shares do not depend on it.
        moves: How often methods of this rank's optimizer have moved its shards outside steps.
        open_: Whether newcomers could go on with this rank from here.

    Raises:
        Interrupted: A rank is gone, and another view begins without it.
        StormError: No rank has anything.
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
            f"rank {group.transport.rank}: no rank of {', '.join(map(str, group.ranks))} has the parameters any more: "
            "start the job again from a checkpoint"
        )
    return Handshake(holders, reported)


def _fingerprint(shard_state: ShardState | None) -> list[int]:
    return [] if shard_state is None else list(fingerprints.of_shard_state(shard_state))


@dataclass
class MoveResult:
    """What a rank has got for a view, before it is in use."""

    masters: list[torch.Tensor]
    """Float32 values of its shard, by bucket."""
    states: dict[tuple[int, Piece], State]
    followed: ShardState | None
    lost: list[int]
    """Shards of the earlier view whose optimizer state is gone."""
    late: list[int]
    """Shards of the earlier view whose last update is gone: the owner died before its standby had it."""
    unequal: list[int]
    """Shards of the earlier view that go on from a standby that is known to differ from the owner."""


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
        handshake: What they have told each other.
        before: The cut of the view that they come from.
        after: The cut of the view that begins.
        held: What this rank has of the former.
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
    # A rank may have followed its owner for one step only, and owns perhaps nothing that the program changes.
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
    # A parameter of which a part has lost its state begins anew as a whole: an optimizer counts one number of steps.
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

"""Policy memory on one rank (residuals, outer optimizer): as a rank, as owner of a shard, as standby of another shard.

A rank's own memory stays with it. Owners' memory moves with their shards when ranks join or leave. A standby follows
the previous member's shard: it receives exactly what that owner has combined, and makes the same update.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stormtorch import collectives
from stormtorch.collectives import Group, Op
from stormtorch.collectives.base.objects import complete
from stormtorch.policies.memory import Memory, MemoryStore
from stormtorch.policies.rank_policy import RankPolicy, remembers
from stormtorch.runtime.handover.moves import Move, MoveSource, Partition, orphans, plan_moves
from stormtorch.runtime.memory.bucket import Bucket
from stormtorch.runtime.memory.chunked import ChunkMemory
from stormtorch.runtime.memory.layout import Layout, repartition

# Numbers of checkpoints travel as float32, which represents all integers up to this.
_MOST_ORIGIN = (1 << 24) - 1


@dataclass(frozen=True)
class CallContext:
    """Rank, round and step for which a function of the policy is called."""

    index: int = 0
    ranks: int = 1
    round: int = 0
    steps: int = 0


@dataclass
class RetainedMemory:
    """A rank's memory as an owner and as a standby in one view."""

    partition: Partition
    owned: list[MemoryStore]
    """Memory of this rank's own shard, by bucket."""
    followed: list[MemoryStore]
    """Memory of the shard that this rank follows, by bucket; empty if it follows none."""


class Memories:
    """The memories of one session.

    Args:
        policy: The user's policy.
        buckets: Buckets of all parameters.
        layouts: Their layouts before any repartition.
    """

    def __init__(self, policy: RankPolicy, buckets: Sequence[Bucket], layouts: Sequence[Layout]) -> None:
        self._policy, self._buckets, self._layouts = policy, buckets, layouts
        self._ranks: list[MemoryStore] = []
        self._held: dict[int, RetainedMemory] = {}
        self._now = 0
        self.call = CallContext()
        """Context of the next calls."""
        self.arrived = 1.0
        """Fraction of the chunks sent to this rank that arrived, in the exchange that it accepts next."""
        self.checkpoint_number = 0
        """Number of the checkpoint that these memories come from, until the first round with them; 0 for none."""
        self._loaded: dict[str, Any] = {}

    @property
    def held(self) -> RetainedMemory:
        """This rank's memory in its current view."""
        return self._held[self._now]

    def partition(self, members: Sequence[int]) -> Partition:
        """Returns the partition of the parameters among some members."""
        standbys = self._policy.standby if self._policy.owners_remember else 0
        pairs = zip(self._layouts, self._buckets, strict=True)
        cuts = [repartition(layout, bucket.dtype.itemsize, len(members), whole=False) for layout, bucket in pairs]
        return Partition(tuple(members), cuts, standbys)

    # --- memory for calls of the policy -------------------------------------------------------------------------------

    def rank(self, bucket: int, first: int) -> ChunkMemory | None:
        """Returns this rank's memory of a part of a bucket; None if the policy's ranks remember nothing.

        Args:
            bucket: Number of the bucket.
            first: First element of the part.
        """
        return self._remembered(self._ranks[bucket], bucket, first, first) if self._ranks else None

    def owner(self, bucket: int, call: CallContext) -> ChunkMemory:
        """Returns the memory of this rank's shard of a bucket.

        Args:
            bucket: Number of the bucket.
            call: Context of the call; `self.call` may belong to a later round already.
        """
        place = self.held.partition.members.index(self._rank)
        first, _ = self.held.partition.layouts[bucket].spans[place]
        return self._remembered(self.held.owned[bucket], bucket, 0, first, call)

    def followed(self, bucket: int) -> ChunkMemory:
        """Returns the memory of the shard of a bucket that this rank follows."""
        return self._remembered(self.held.followed[bucket], bucket, 0, 0)

    def _remembered(
        self, store: MemoryStore, bucket: int, shift: int, first: int, call: CallContext | None = None
    ) -> ChunkMemory:
        """Returns windows of a store, with offset and context: store position `shift` is bucket element `first`."""
        before = sum(each.elements for each in self._layouts[:bucket])
        call = self.call if call is None else call

        def window(begin: int, rows: int, per_chunk: int) -> Memory:
            memory = store.chunks(shift + begin, rows, per_chunk)
            memory.told(index=call.index, ranks=call.ranks, round_=call.round, steps=call.steps)
            memory.offset, memory.arrived = before + first + begin, self.arrived
            return memory

        return window

    # --- beginning ----------------------------------------------------------------------------------------------------

    def begin(self, rank: int, view: int, members: Sequence[int]) -> None:
        """Initialises all memories at the start of training, when all ranks have the same parameters."""
        partition = self.partition(members)
        self._rank, self._now = rank, view
        place = partition.members.index(rank)
        owned = self._new(partition, place)
        followed = self._new(partition, place - 1) if self._follows(partition) else []
        self._held = {view: RetainedMemory(partition, owned, followed)}
        for stores, shard in ((owned, place), (followed, place - 1)):
            for store, bucket, layout in zip(stores, self._buckets, partition.layouts, strict=False):
                first, count = layout.spans[shard % len(members)]
                self._begin_owner(store, 0, bucket.flat[first : first + count].detach().float().cpu())
        self.begin_ranks()

    def reset(self) -> None:
        """Initialises all memories again from loaded parameters, the same on all ranks."""
        if self._now in self._held:
            self.begin(self._rank, self._now, self.held.partition.members)
            self._restore(self._loaded)  # the optimizer's state may be loaded before the model's

    def begin_ranks(self) -> None:
        """Initialises this rank's own memory from its parameters."""
        if not remembers(self._policy):
            return
        self._ranks = [MemoryStore(each.elements) for each in self._layouts]
        for store, bucket in zip(self._ranks, self._buckets, strict=True):
            values = bucket.flat.detach().float().cpu()
            self._policy.begin_rank(store.chunks(0, 1, values.numel()), values.view(1, -1))

    def _begin_owner(self, store: MemoryStore, first: int, values: torch.Tensor) -> None:
        if values.numel():
            self._policy.begin_owner(store.chunks(first, 1, values.numel()), values.view(1, -1))

    def _new(self, partition: Partition, shard: int) -> list[MemoryStore]:
        return [MemoryStore(layout.spans[shard % len(partition.members)][1]) for layout in partition.layouts]

    def _follows(self, partition: Partition) -> bool:
        return partition.standby(0) is not None

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self, moment: str) -> dict[str, Any]:
        """Returns all memories of this rank for a checkpoint; empty if it has none.

        Args:
            moment: Text that identifies the checkpoint: the same on all ranks, and different at other times.
        """
        held = self._held.get(self._now)
        stores = {"rank": self._ranks, **({} if held is None else {"owned": held.owned, "followed": held.followed})}
        if held is None or not any(store.vectors for each in stores.values() for store in each):
            return {}
        place, ranks = held.partition.members.index(self._rank), len(held.partition.members)
        checkpoint_number = 1 + zlib.crc32(f"{moment}/{ranks}".encode()) % _MOST_ORIGIN
        kept = {name: [store.state_dict() for store in each] for name, each in stores.items()}
        return {"place": place, "ranks": ranks, "origin": checkpoint_number, **kept}

    def load_state_dict(self, state: dict[str, Any]) -> str:
        """Restores a `state_dict` of the rank at the same position, among the same number of ranks.

        Returns:
            Why the memories are initialised instead; empty if they were restored.
        """
        self._loaded = {}
        self.reset()
        self.checkpoint_number = 0
        place, ranks = self.held.partition.members.index(self._rank), len(self.held.partition.members)
        if (state.get("place"), state.get("ranks")) != (place, ranks):
            return f"the checkpoint is that of rank {state.get('place')} of {state.get('ranks')}"
        if not self._restore(state):
            return "the checkpoint is that of another model or policy"
        self._loaded, self.checkpoint_number = state, int(state["origin"])
        return ""

    def used(self) -> None:
        """Called after a round with these memories."""
        self._loaded, self.checkpoint_number = {}, 0

    def _restore(self, state: dict[str, Any]) -> bool:
        if not state:
            return False
        pairs: list[tuple[MemoryStore, dict[str, torch.Tensor]]] = []
        for name, stores in (("rank", self._ranks), ("owned", self.held.owned), ("followed", self.held.followed)):
            if len(stores) != len(state[name]):
                return False
            pairs += zip(stores, state[name], strict=True)
        for store, vectors in pairs:
            if set(store.vectors) != set(vectors) or any(each.numel() != store.count for each in vectors.values()):
                return False
        for store, vectors in pairs:
            store.load_state_dict({name: each.clone() for name, each in vectors.items()})
        return True

    # --- moving -------------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Returns the names of the vectors in owners' memory."""
        held = self._held.get(self._now)
        return sorted({name for store in (*held.owned, *held.followed) for name in store.vectors}) if held else []

    @property
    def view(self) -> int:
        """Number of the view that this rank's memory belongs to."""
        return self._now

    def members(self) -> list[int]:
        """Returns the members of the view that this rank's memory belongs to."""
        held = self._held.get(self._now)
        return list(held.partition.members) if held else []

    def move(
        self,
        group: Group,
        view: int,
        before: Sequence[int],
        after: Sequence[int],
        holders: Collection[int],
        names: list[str],
    ) -> None:
        """Moves owners' memory to the owners of a view that begins.

        This rank retains its former memory until `settle`, because the view may be superseded.

        Args:
            group: Members of the new view.
            view: Its number.
            before: Members of the view that the ranks come from.
            after: Members of the new view.
            holders: Ranks that still have their memory.
            names: Names of the vectors in owners' memory.

        Raises:
            Interrupted: Another view begins.
        """
        rank = group.transport.rank
        old, new = self.partition(before), self.partition(after)
        mine = self._held.get(self._now)
        place = new.members.index(rank)
        self._rank = rank
        held = RetainedMemory(new, self._new(new, place), self._new(new, place - 1) if self._follows(new) else [])
        if self._policy.owners_remember:
            copies = dict.fromkeys(orphans(old, holders), min(holders))
            moves = plan_moves(old, new, holders, (), copies)
            pending = []
            for number, move in enumerate(moves):
                if rank in (move.sender, move.receiver):
                    pending.append(self._start(group, number, move, mine, names))
            for move, message, collective in pending:
                if collective is not None:
                    complete(collective, group)
                if move.receiver == rank:
                    self._take(held, place, move, message, names)
        self._held[view] = held
        self._now = view
        self.recompute_known_mean(group)

    def recompute_known_mean(self, group: Group) -> None:
        """Recomputes the owners' known mean over all members, because some have left and others start empty.

        A departed rank must leave no contribution, and its successor must not contribute it twice.

        Raises:
            Interrupted: Another view begins.
        """
        if self._policy.known is None:
            return
        own, mean = self._policy.known
        place = self.held.partition.members.index(self._rank)
        for bucket, (store, layout) in enumerate(zip(self._ranks, self.held.partition.layouts, strict=True)):
            known = store.vector(own).clone()
            complete(collectives.all_reduce(group, known, Op.AVG), group)
            for stores, shard in ((self.held.owned, place), (self.held.followed, place - 1)):
                if stores:
                    first, count = layout.spans[shard % len(layout.spans)]
                    stores[bucket].write([mean], 0, known[first : first + count].view(1, -1))

    def _start(
        self, group: Group, number: int, move: Move, mine: RetainedMemory | None, names: list[str]
    ) -> tuple[Move, torch.Tensor, collectives.Pending | None]:
        """Begins one move: returns the message, and the collective that carries it if it must travel."""
        rows = 1 if move.source is MoveSource.COPY else max(len(names), 1)
        rank = group.transport.rank
        if move.sender == rank:
            message = self._message_of(move, mine, names)
        else:
            message = torch.empty(rows, move.count, dtype=torch.float32, device="cpu")
        if move.sender == move.receiver:
            return move, message, None
        sender, receiver = group.ranks.index(move.sender), group.ranks.index(move.receiver)
        if move.sender == rank:
            return move, message, collectives.send(group, message, receiver, tag=number)
        return move, message, collectives.receive(group, message, sender, tag=number)

    def _message_of(self, move: Move, mine: RetainedMemory | None, names: list[str]) -> torch.Tensor:
        if move.source is MoveSource.COPY:
            flat = self._buckets[move.bucket].flat
            return flat[move.first : move.first + move.count].detach().float().cpu().view(1, -1).clone()
        assert mine is not None, "only a rank with memory sends it"
        first, _ = mine.partition.layouts[move.bucket].spans[move.shard]
        stores = mine.owned if move.source is MoveSource.OWNER else mine.followed
        if not names:
            return torch.zeros(1, move.count, dtype=torch.float32, device="cpu")
        return stores[move.bucket].read(names, move.first - first, move.count).contiguous()

    def _take(self, held: RetainedMemory, place: int, move: Move, message: torch.Tensor, names: list[str]) -> None:
        shard = (place - 1) % len(held.partition.members) if move.as_standby else place
        store = (held.followed if move.as_standby else held.owned)[move.bucket]
        first = move.first - held.partition.layouts[move.bucket].spans[shard][0]
        if move.source is MoveSource.COPY:
            self._begin_owner(store, first, message.view(-1))
        elif names:
            store.write(names, first, message)

    def roll_back(self, view: int) -> None:
        """Returns to this rank's memory of an earlier view."""
        if view in self._held:
            self._now = view

    def settle(self) -> None:
        """Drops this rank's memory of views before the current one."""
        self._held = {self._now: self._held[self._now]}

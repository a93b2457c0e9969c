"""What a policy remembers on one rank: of all parameters as a rank, of its shard as an owner, of another as a standby.

A rank's own memory stays with it. What owners remember moves with their shards when ranks come or go. A standby follows
the owner before it: it gets what the owner has combined, exactly, and makes the same update.
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
    """For whom and when a function of the policy is called."""

    index: int = 0
    ranks: int = 1
    round: int = 0
    steps: int = 0


@dataclass
class RetainedMemory:
    """What a rank holds as an owner and as a standby in one view."""

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
        layouts: Their layouts as they were planned.
    """

    def __init__(self, policy: RankPolicy, buckets: Sequence[Bucket], layouts: Sequence[Layout]) -> None:
        self._policy, self._buckets, self._layouts = policy, buckets, layouts
        self._ranks: list[MemoryStore] = []
        self._held: dict[int, RetainedMemory] = {}
        self._now = 0
        self.call = CallContext()
        """For whom and when functions are called next."""
        self.arrived = 1.0
        """Fraction of what was sent to this rank that has arrived, of the exchange that it accepts next."""
        self.checkpoint_number = 0
        """Number of the checkpoint that these memories come from, until a round is made with them; 0 for none."""
        self._loaded: dict[str, Any] = {}

    @property
    def held(self) -> RetainedMemory:
        """What this rank holds in the view that it is in."""
        return self._held[self._now]

    def partition(self, members: Sequence[int]) -> Partition:
        """Returns how parameters are divided among some members."""
        standbys = self._policy.standby if self._policy.owners_remember else 0
        pairs = zip(self._layouts, self._buckets, strict=True)
        cuts = [repartition(layout, bucket.dtype.itemsize, len(members), whole=False) for layout, bucket in pairs]
        return Partition(tuple(members), cuts, standbys)

    # --- for calls of the policy --------------------------------------------------------------------------------------

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
            call: For whom and when the policy is called; `self.call` may be that of a later round.
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
        """Gives a store's windows, which begin at `shift`, a place in the model, where they begin at `first`."""
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
        """Begins the memories of a training, in which all ranks have the same parameters."""
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
        """Begins all memories anew, with parameters that were loaded, the same on all ranks."""
        if self._now in self._held:
            self.begin(self._rank, self._now, self.held.partition.members)
            self._restore(self._loaded)  # the optimizer's state may be loaded before the model's

    def begin_ranks(self) -> None:
        """Begins this rank's own memory, with the parameters that it has."""
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
        """Returns all that this rank holds, for a checkpoint; nothing if it holds nothing.

        Args:
            moment: When that is, in words that are the same on all ranks then, and hardly ever at another time.
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
        """Goes on from what `state_dict` returned on the rank of the same place, among as many ranks.

        Returns:
            Why it begins anew instead, in words; nothing if it goes on.
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
        """Called when a round has been made with these memories."""
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
        """Returns the names under which owners remember something."""
        held = self._held.get(self._now)
        return sorted({name for store in (*held.owned, *held.followed) for name in store.vectors}) if held else []

    @property
    def view(self) -> int:
        """Number of the view in which this rank holds what it holds."""
        return self._now

    def members(self) -> list[int]:
        """Returns the members of the view in which this rank holds what it holds."""
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
        """Moves what owners remember to the owners of a view that begins.

        What this rank had before is kept until `settle`: the view may not come about.

        Args:
            group: Members of the new view.
            view: Its number.
            before: Members of the view that the ranks come from.
            after: Members of the new view.
            holders: Ranks that hold what they had.
            names: Names under which owners remember something.

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
        """Computes the mean of what owners know of all members, as some are gone and others begin anew.

        A rank that is gone leaves nothing behind, and its successor does not tell again what owners count already.

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
        assert mine is not None, "only a rank that holds something gives it"
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
        """Goes on from what this rank held in another view than the one that was moved to last."""
        if view in self._held:
            self._now = view

    def settle(self) -> None:
        """Forgets what this rank held before the view that it is in."""
        self._held = {self._now: self._held[self._now]}

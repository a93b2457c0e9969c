"""The exchanges of a `RankPolicy`: a vector per bucket goes to the owners of its shards, and answers come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from stormtorch import collectives
from stormtorch.collectives import Group, Op, Pending
from stormtorch.collectives.wire import Wire, narrower
from stormtorch.policies.policy import RankPolicy, applied, overrides
from stormtorch.runtime.arrivals import Links
from stormtorch.runtime.bucket import Bucket
from stormtorch.runtime.chunked import chunked
from stormtorch.runtime.profiling import shown
from stormtorch.staging.order import Order
from stormtorch.transport.exchange import Arrival

Vectors = Callable[[Bucket], tuple[torch.Tensor, torch.Tensor]]
"""Returns the vector of a bucket that ranks exchange, and the memory that the network reads and writes."""


@dataclass
class _Round:
    """The exchange of one bucket that is under way."""

    group: Group
    fused: bool
    """Whether one all-reduce does both stages."""
    begun: Future[Sequence[Pending]] | Sequence[Pending]
    """The first stage; empty once it has ended."""
    mean: torch.Tensor
    """Memory for the owner's mean of what arrived; empty where one all-reduce does both stages."""
    seed: int
    """Seed of the offsets of the wire's grids."""
    back: Pending | None = None
    """The second stage, once it has begun."""
    rooms: list[torch.Tensor] = field(default_factory=list)
    """Memory for the answer of each owner."""


class Averages:
    """The exchanges of one session.

    Where the policy is a plain mean, one all-reduce does both stages and sends on each chunk as soon as it is complete.
    Otherwise the policy's functions run between a reduce-scatter and an all-gather.

    Args:
        policy: The user's policy.
        buckets: Buckets whose vectors are exchanged.
        vectors: Returns the vector of a bucket.
        order: Starts exchanges once data has left the GPU.
        group: All ranks.
    """

    def __init__(
        self,
        policy: RankPolicy,
        buckets: Sequence[Bucket],
        vectors: Vectors,
        order: Order,
        group: Group,
    ) -> None:
        size, chunk_bytes = group.size, group.transport.chunk_bytes
        self.up, self.down = Links(size), Links(size)
        """Chunks that arrived from each peer since the last `clear`, on the way to owners and back."""
        self.losses = [0.0] * size
        """Measured loss of what this rank sends to each rank."""
        self.present = size
        """Number of ranks that are there, as far as is known."""
        self.effective_batch = 1.0
        self.variance_inflation = 1.0
        self._all = group
        self._policy = policy
        self._buckets = buckets
        self._vectors = vectors
        self._order = order
        self._wires = [Wire(narrower(policy.wire, bucket.dtype), chunk_bytes) for bucket in buckets]
        # A model that is rounded at every exchange would never move by less than that: ranks keep what rounding took.
        self._keeps = policy.sends == "parameters" and policy.wire.is_floating_point
        self._plain = not any(overrides(policy, name) for name in ("send", "combine", "update", "accept"))
        self._accepts = overrides(policy, "accept")
        self._rounds: dict[int, _Round] = {}
        # Whole chunks and a short last one are separate calls, each with a memory of its own.
        self._memory: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
        self._copies = self._inverse = self._chunks = 0.0

    def chunks_of(self, owner: int) -> int:
        """Returns the number of chunks in an owner's shards."""
        return sum(self._wires[each.index].chunks(each.layout.spans[owner][1]) for each in self._buckets)

    @property
    def fused(self) -> bool:
        """Whether one collective does all of every bucket's exchange."""
        return self._plain and all(self._wires[each.index].dtype == each.dtype for each in self._buckets)

    def clear(self) -> None:
        """Resets all counts."""
        self.up.clear()
        self.down.clear()
        self._copies = self._inverse = self._chunks = 0.0

    # --- stage 1 ------------------------------------------------------------------------------------------------------

    def start(self, bucket: Bucket, group: Group, seed: int = 0) -> None:
        """Begins to send a bucket's vector.

        Args:
            bucket: The bucket.
            group: All ranks, in the order in which they own the shards.
            seed: Seed of the offsets of the wire's grids.
        """
        vector, host = self._vectors(bucket)
        wire = self._wires[bucket.index]
        fused = self._plain and wire.dtype == bucket.dtype
        with shown("all_reduce" if fused else "reduce_scatter", bucket.index, vector.numel(), wire.dtype):
            moments = bucket.fetch(host, vector) if bucket.on_gpu else []
            if fused:
                mean = host.new_empty(0)

                def begin() -> Pending:
                    reliability, share = self._policy.up, self._policy.down
                    return collectives.all_reduce(group, host, Op.AVG, reliability=reliability, share=share)
            else:
                mean = torch.empty(bucket.layout.spans[group.rank][1], dtype=torch.float32, device="cpu")

                def begin() -> Pending:
                    return self._reduce(bucket, group, host, mean)

            begun = self._order.begin(lambda: [begin()], moments)
        self._rounds[bucket.index] = _Round(group, fused, begun, mean, seed)  # type: ignore[arg-type]  # it holds what `begin` returns

    def _reduce(self, bucket: Bucket, group: Group, host: torch.Tensor, mean: torch.Tensor) -> Pending:
        wire, policy = self._wires[bucket.index], self._policy
        travels = wire.reduces
        parts = bucket.shards(host)
        if policy.weighs:
            parts = [
                chunked(policy.send, wire.per_chunk, [part], [self.losses[self._all.ranks.index(rank)]])
                for part, rank in zip(parts, group.ranks, strict=True)
            ]
        reduce = wire.reduce_scatter
        return reduce(group, mean, [part.to(travels) for part in parts], Op.AVG, reliability=policy.up)

    # --- stage 2 ------------------------------------------------------------------------------------------------------

    def finish(self, bucket: Bucket) -> None:
        """Waits until a bucket's vector holds what the policy accepts of the answers."""
        self._turn(bucket)
        if not self._rounds[bucket.index].fused:
            for each in list(self._rounds):
                self._turn(self._buckets[each])  # others wait for what this rank makes of its shards
        round_ = self._rounds.pop(bucket.index)
        vector, host = self._vectors(bucket)
        if round_.back is not None:
            with shown("all_gather wait", bucket.index, vector.numel(), self._wires[bucket.index].dtype):
                arrivals = round_.back.wait()
            self._accept(bucket, host, round_, arrivals[0] if arrivals else None)
        if bucket.on_gpu:
            bucket.bring(vector, host)

    def _turn(self, bucket: Bucket) -> None:
        """Waits for a bucket's first stage and begins the second, unless that has been done."""
        round_ = self._rounds[bucket.index]
        if round_.back is not None or not round_.begun:
            return
        name = "all_reduce wait" if round_.fused else "reduce_scatter wait"
        with shown(name, bucket.index, bucket.layout.elements, self._wires[bucket.index].dtype):
            (pending,) = round_.begun.result() if isinstance(round_.begun, Future) else round_.begun
            arrivals = pending.wait()
        round_.begun = ()
        for arrival in arrivals:
            # Counts are per rank of the session's group, not per place in this round's order.
            self.up.add(self._all, arrival)
            self._count(arrival)
            if round_.fused:
                self.down.add(self._all, arrival, stage=1)
        if not round_.fused:
            self._give_back(bucket, round_, arrivals)

    def _give_back(self, bucket: Bucket, round_: _Round, arrivals: list[Arrival]) -> None:
        wire, policy, group = self._wires[bucket.index], self._policy, round_.group
        alone = torch.ones(wire.chunks(round_.mean.numel()), device="cpu")
        counts_C = arrivals[0].counts() if arrivals and arrivals[0].counts().numel() else alone
        value = chunked(policy.combine, wire.per_chunk, [round_.mean], [counts_C, self.present])

        def update(combined: torch.Tensor) -> torch.Tensor:
            memory = self._memory.setdefault((bucket.index, combined.shape[-1]), {})
            return applied(policy.update, memory, combined)

        value = chunked(update, wire.per_chunk, [value])
        message = wire.encode(value, round_.seed)
        round_.rooms = [wire.room(count) for _, count in bucket.layout.spans]
        round_.rooms[group.rank] = message
        round_.back = collectives.all_gather(group, round_.rooms, message, reliability=policy.down)

    def _accept(self, bucket: Bucket, host: torch.Tensor, round_: _Round, arrival: Arrival | None) -> None:
        """Takes what came of each owner's shard, also from this rank's own message: all ranks take the same values."""
        wire, group = self._wires[bucket.index], round_.group
        if arrival is not None:
            self.down.add(self._all, arrival)
        for owner, (own, room) in enumerate(zip(bucket.shards(host), round_.rooms, strict=True)):
            if not own.numel():
                continue
            if owner == group.rank or arrival is None:
                arrived_C = torch.ones(wire.chunks(own.numel()), dtype=torch.bool, device="cpu")
            else:
                arrived_C = arrival.mask(group.ranks[owner])
            keeps = self._keeps and wire.dtype != bucket.dtype
            if self._accepts or keeps:
                came = torch.full_like(own, torch.nan)  # a policy that uses what was lost shows it at once
                wire.place(room, came, arrived_C)
                if keeps:
                    came += own - own.to(wire.dtype)
                own.copy_(chunked(self._policy.accept, wire.per_chunk, [own, came], [arrived_C]))
            else:
                wire.place(room, own, arrived_C)

    def _count(self, arrival: Arrival) -> None:
        counts = arrival.counts()
        if counts.numel():
            self._copies += float(counts.sum())
            self._inverse += float(counts.reciprocal().sum())
            self._chunks += counts.numel()
            self.effective_batch = self._copies / (self._all.size * self._chunks)
            self.variance_inflation = self._all.size * self._inverse / self._chunks

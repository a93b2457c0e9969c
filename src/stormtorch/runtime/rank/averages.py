"""All-reduce, or reduce-scatter and all-gather, of a `RankPolicy`: buckets go to shard owners, answers come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from stormtorch import collectives
from stormtorch.collectives import Group, Op, Pending
from stormtorch.collectives.formats.sparse import SparseWire
from stormtorch.collectives.wire import Wire, narrower
from stormtorch.exchange.exchange import ExchangeResult
from stormtorch.policies import rules
from stormtorch.policies.memory import Memory
from stormtorch.policies.policy import overrides
from stormtorch.policies.rank_policy import RankPolicy, takes_rank
from stormtorch.runtime.memory.arrival_counts import ArrivalCounts
from stormtorch.runtime.memory.bucket import Bucket
from stormtorch.runtime.memory.chunked import ChunkMemory, chunked, windows
from stormtorch.runtime.rank.memories import CallContext, Memories
from stormtorch.runtime.session.adaptive_deadline import AdaptiveDeadline
from stormtorch.runtime.session.profiling import profiler_range
from stormtorch.runtime.session.relays import Relays
from stormtorch.staging.launch_queue import LaunchQueue

Vectors = Callable[[Bucket], tuple[torch.Tensor, torch.Tensor]]
"""Returns the vector of a bucket that ranks exchange, and the memory that the network reads and writes."""


@dataclass
class Participation:
    """How this rank takes part in a round."""

    weight: float = 1.0
    """Weight of this rank's contribution."""
    takes: bool = True
    """Whether this rank accepts the result."""
    all_weights: Pending | None = None
    """All-gather of all ranks' weights; None if all of them are 1."""
    weights_N: list[torch.Tensor] = field(default_factory=list)
    """Memory for the weights, one element for each rank."""
    partner: int = -1
    """Position of this rank's partner, under a policy that exchanges in pairs."""

    def weights(self) -> torch.Tensor:
        """Returns the weights of all ranks, once `all_weights` is complete."""
        return torch.cat(self.weights_N)


@dataclass
class _BucketExchange:
    """A running exchange of one bucket."""

    group: Group
    participation: Participation
    begun: Future[Sequence[Pending]] | Sequence[Pending]
    """Running operations: one all-reduce, or the answer stage after the first stage, or a pair's messages."""
    fused: bool = False
    """Whether one all-reduce does both stages."""
    mean: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """Memory for the owner's mean of what arrived."""
    parts: list[torch.Tensor] = field(default_factory=list)
    """What this rank has sent to each owner, unweighted; only if the policy needs it."""
    messages: list[torch.Tensor] = field(default_factory=list)
    """Memory for each rank's message of this owner's shard; only if the engine does not sum them."""
    seed: int = 0
    """Seed of the offsets of the wire's grids."""
    up: list[ExchangeResult] = field(default_factory=list)
    """Results of the first stage, once it is complete."""
    receive_buffers: list[torch.Tensor] = field(default_factory=list)
    """Memory for the answer of each owner, or for the partner's message."""
    known_C: list[torch.Tensor] = field(default_factory=list)
    """For each owner, memory for a mask of this rank's chunks that have reached it."""
    combined: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """Memory for the combined values of the owner that this rank follows."""


AnyWire = Wire | SparseWire


def wires_of(
    policy: RankPolicy, buckets: Sequence[Bucket], chunk_bytes: int
) -> tuple[Sequence[AnyWire], Sequence[AnyWire]]:
    """Returns each bucket's number formats, to owners and back: never wider than the bucket's own dtype."""
    if policy.codes is not None:
        up, down = ([SparseWire(code, chunk_bytes)] * len(buckets) for code in policy.codes)
        return up, down
    wires = [Wire(narrower(policy.wire, bucket.dtype), chunk_bytes) for bucket in buckets]
    return wires, wires


class Averages:
    """The exchanges of one session.

    For a plain mean, one all-reduce does both stages and forwards each chunk as soon as it is complete. For other
    policies, the policy's functions run between a reduce-scatter and an all-gather. They run on a background thread, so
    that other ranks get their answers while this rank computes. Ranks that exchange in pairs send each other the whole
    vector.

    Args:
        policy: The user's policy.
        buckets: Buckets whose vectors are exchanged.
        vectors: Returns the vector of a bucket.
        order: Starts exchanges once data has left the GPU.
        group: All ranks.
        memories: What the policy remembers.
        reports: Groups, by bucket, in which owners report to ranks which of their chunks arrived.
        following: Groups, by bucket, in which standbys follow owners.
    """

    def __init__(
        self,
        policy: RankPolicy,
        buckets: Sequence[Bucket],
        vectors: Vectors,
        order: LaunchQueue,
        group: Group,
        memories: Memories,
        reports: Sequence[Group],
        following: Sequence[Group],
    ) -> None:
        size = group.size
        self._up_deadline = AdaptiveDeadline(policy.allowed_loss, exact=policy.up.exact)
        self._down_deadline = AdaptiveDeadline(policy.allowed_loss, exact=policy.down.exact)
        self.up, self.down = ArrivalCounts(size), ArrivalCounts(size)
        """Chunks that arrived from each peer since the last `clear`, on the way to owners and back."""
        self.losses = [0.0] * size
        """Measured loss of what this rank sends to each rank."""
        self.present = size
        """Number of ranks present, as far as is known."""
        self.effective_batch = 1.0
        self.variance_inflation = 1.0
        self._all = group
        self._policy = policy
        self._buckets = buckets
        self._vectors = vectors
        self._order = order
        self._memories = memories
        self._reports, self._following = reports, following
        self._relays = Relays(group.transport)
        self._wires, self._answers = wires_of(policy, buckets, group.transport.chunk_bytes)
        # Rounding at every exchange would swallow updates smaller than a rounding step: ranks keep the residual.
        self._keeps = policy.sends == "parameters" and policy.wire.is_floating_point and policy.codes is None
        changed = any(overrides(policy, name) for name in ("send", "combine", "update", "accept", "sent"))
        self._plain = not (changed or policy.delay or policy.pace == "fastest" or policy.exchanges_in_pairs)
        self._accepts = overrides(policy, "accept")
        self._follows = policy.owners_remember and memories.held.partition.standby(0) is not None
        self._rounds: dict[int, _BucketExchange] = {}
        self._copies = self._inverse = self._chunks = 0.0

    def chunks_of(self, owner: int) -> int:
        """Returns the number of chunks in an owner's shards."""
        return sum(self._wires[each.index].chunks(each.spans[owner][1]) for each in self._buckets)

    @property
    def fused(self) -> bool:
        """Whether one collective does all of every bucket's exchange."""
        return self._plain and all(self._wires[each.index].dtype == each.dtype for each in self._buckets)

    def clear(self) -> None:
        """Updates the adaptive deadlines from all counts, and resets the counts."""
        self._up_deadline.learn(self.up)
        self._down_deadline.learn(self.down)
        self.up.clear()
        self.down.clear()
        self._copies = self._inverse = self._chunks = 0.0

    # --- beginning ----------------------------------------------------------------------------------------------------

    def start(self, bucket: Bucket, group: Group, participation: Participation, seed: int = 0) -> None:
        """Begins to send a bucket's vector.

        Args:
            bucket: The bucket.
            group: All ranks, in the order in which they own the shards.
            participation: How this rank takes part in the round.
            seed: Seed of the offsets of the wire's grids.
        """
        vector, host = self._vectors(bucket)
        wire = self._wires[bucket.index]
        fused = self._plain and wire.dtype == bucket.dtype
        name = "all_reduce" if fused else "exchange" if self._policy.exchanges_in_pairs else "reduce_scatter"
        with profiler_range(name, bucket.index, vector.numel(), wire.dtype):
            events = bucket.fetch(host, vector) if bucket.is_staged else []
            if fused:

                def begin() -> Pending:
                    # One exchange has both stages, and each has half of the time.
                    reliability = self._up_deadline.within(self._policy.up, part=0.5)
                    share = self._down_deadline.within(self._policy.down, part=0.5)
                    return collectives.all_reduce(group, host, Op.AVG, reliability=reliability, share=share)

                begun = self._order.begin(lambda: [begin()], events)
                self._rounds[bucket.index] = _BucketExchange(
                    group,
                    participation,
                    begun,  # type: ignore[arg-type]  # it holds what `begin` returns
                    True,
                )
                return
            for moment in events:
                moment.synchronize()
            if self._policy.exchanges_in_pairs:
                self._rounds[bucket.index] = self._exchange_pair(bucket, group, host, participation, seed)
            else:
                self._rounds[bucket.index] = self._reduce(bucket, group, host, participation, seed)

    def _sent(self, bucket: Bucket, part: torch.Tensor, first: int, loss: float) -> torch.Tensor:
        """Returns the values that the policy sends for a part of a bucket, in memory that training does not change."""
        policy, wire = self._policy, self._wires[bucket.index]
        if not overrides(policy, "send"):
            return part.clone() if policy.delay else part
        memory = self._memories.rank(bucket.index, first)
        takes = takes_rank(policy.send)
        return chunked(policy.send, wire.per_chunk, [part], [loss], memory if takes else None)

    def _exchange_pair(
        self, bucket: Bucket, group: Group, host: torch.Tensor, participation: Participation, seed: int
    ) -> _BucketExchange:
        wire, up = self._wires[bucket.index], self._up_deadline.within(self._policy.up)
        if participation.partner == group.rank:
            return _BucketExchange(group, participation, ())
        message = wire.encode(self._sent(bucket, host, 0, self.losses[participation.partner]), seed)
        buffer = wire.room(host.numel())
        begun = (
            collectives.send(group, message, participation.partner, reliability=up),
            collectives.receive(group, buffer, participation.partner, reliability=up),
        )
        return _BucketExchange(group, participation, begun, receive_buffers=[buffer])

    def _reduce(
        self, bucket: Bucket, group: Group, host: torch.Tensor, participation: Participation, seed: int
    ) -> _BucketExchange:
        """Begins the first stage; the second follows it on a background thread."""
        wire, policy = self._wires[bucket.index], self._policy
        spans = bucket.spans
        parts = [
            self._sent(bucket, part, first, self.losses[self._all.ranks.index(rank)])
            for part, (first, _), rank in zip(bucket.shards(host), spans, group.ranks, strict=True)
        ]
        mean = torch.empty(spans[group.rank][1], dtype=torch.float32, device="cpu")
        kept = parts if policy.reports or participation.weights_N else []
        round_ = _BucketExchange(group, participation, (), mean=mean, parts=kept, seed=seed)
        weighed = parts if participation.weight == 1.0 else [part * participation.weight for part in parts]
        if self._by_messages(wire):
            messages = [wire.encode(part.float(), seed) for part in weighed]
            round_.parts = [wire.rounded(part.float(), seed) for part in weighed] if kept else []
            round_.messages = [wire.room(mean.numel()) for _ in messages]
            first = collectives.all_to_all(
                group, round_.messages, messages, reliability=self._up_deadline.within(policy.up)
            )
        else:
            assert isinstance(wire, Wire), "sparse messages are read one by one"
            given = [part.to(wire.reduces) for part in weighed]
            first = wire.reduce_scatter(group, mean, given, reliability=self._up_deadline.within(policy.up))
        needed = [first] if participation.all_weights is None else [first, participation.all_weights]
        call = self._memories.call

        def then() -> Sequence[Pending]:
            round_.up = first.wait()
            return self._send_answer(bucket, round_, call)

        round_.begun = [self._relays.begin(needed, then, group.others())]
        return round_

    def _by_messages(self, wire: AnyWire) -> bool:
        """Whether an owner decodes each message: the engine has no sparse format, and does not report rounding."""
        return isinstance(wire, SparseWire) or (wire.grids and self._policy.reports)

    def _add_up(self, wire: AnyWire, round_: _BucketExchange) -> torch.Tensor:
        """Averages the messages of all ranks, and returns how many copies of each chunk arrived."""
        group, sums = round_.group, torch.zeros_like(round_.mean)
        counts_C = torch.zeros(wire.chunks(sums.numel()), device="cpu")
        for peer, (rank, message) in enumerate(zip(group.ranks, round_.messages, strict=True)):
            arrived_C = torch.ones(counts_C.numel(), dtype=torch.bool, device="cpu")
            if peer != group.rank:
                arrived_C = round_.up[0].mask(rank)
            values = torch.zeros_like(sums)
            wire.place(message, values, arrived_C)
            sums += values
            counts_C += arrived_C
        for first, last, chunks in windows(sums.numel(), wire.per_chunk):
            rows = chunks.stop - chunks.start
            rules.mean_of_arrived(sums[first:last].view(rows, -1), counts_C[chunks])
        round_.mean.copy_(sums)
        return counts_C

    # --- owners -------------------------------------------------------------------------------------------------------

    def _send_answer(self, bucket: Bucket, round_: _BucketExchange, call: CallContext) -> Sequence[Pending]:
        """Computes this owner's answer from the contributions that arrived, and begins to send it."""
        wire, policy, group = self._wires[bucket.index], self._policy, round_.group
        mean, counts_C = self._mean(bucket, round_)
        value = chunked(policy.combine, wire.per_chunk, [mean], [counts_C, self.present])
        begun: list[Pending] = []
        if self._follows:
            begun += self._send_to_standby(bucket, round_, value)
        value = self._update(self._memories.owner(bucket.index, call), wire.per_chunk, value)
        answer = self._answers[bucket.index]
        message = answer.encode(value, round_.seed)
        round_.receive_buffers = [answer.room(count) for _, count in bucket.spans]
        round_.receive_buffers[group.rank] = message
        begun.insert(
            0,
            collectives.all_gather(
                group, round_.receive_buffers, message, reliability=self._down_deadline.within(policy.down)
            ),
        )
        if policy.reports:
            begun.append(self._report(bucket, round_))
        return begun

    def _update(self, memory: ChunkMemory, per_chunk: int, combined: torch.Tensor) -> torch.Tensor:
        def update(values: torch.Tensor, owner: Memory) -> torch.Tensor:
            return self._policy.update(owner, values)

        update.__qualname__ = self._policy.update.__qualname__
        return chunked(update, per_chunk, [combined], memory=memory)

    def _mean(self, bucket: Bucket, round_: _BucketExchange) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the mean of what arrived, and how many copies of each chunk did."""
        wire, group = self._wires[bucket.index], round_.group
        chunks = wire.chunks(round_.mean.numel())
        arrival = round_.up[0] if round_.up else None
        counts_C = torch.ones(chunks, device="cpu")
        if round_.messages and arrival is not None:
            counts_C = self._add_up(wire, round_)
        elif arrival is not None and arrival.counts().numel():
            counts_C = arrival.counts().float()
        if not round_.participation.weights_N:
            return round_.mean, counts_C
        weights = round_.participation.weights()
        arrived_NC = torch.zeros(group.size, chunks, device="cpu")
        for peer, rank in enumerate(group.ranks):
            if peer == group.rank:
                arrived_NC[peer] = 1.0
            elif arrival is not None:
                arrived_NC[peer] = arrival.mask(rank).float()

        def weigh(mean: torch.Tensor, own: torch.Tensor, count: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return rules.weighted_mean(mean * count, weight.squeeze(-1), own)

        own = round_.parts[group.rank].float()
        mean = chunked(weigh, wire.per_chunk, [round_.mean, own], [counts_C, weights @ arrived_NC])
        return mean, (weights > 0.0).float() @ arrived_NC

    def _send_to_standby(self, bucket: Bucket, round_: _BucketExchange, combined: torch.Tensor) -> list[Pending]:
        """Sends combined values to this shard's standby, and receives those of the shard that this rank follows."""
        group = self._following[bucket.index]
        after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        round_.combined = torch.empty(bucket.spans[before][1], dtype=torch.float32, device="cpu")
        return [collectives.send(group, combined, after), collectives.receive(group, round_.combined, before)]

    def _report(self, bucket: Bucket, round_: _BucketExchange) -> Pending:
        """Reports to every rank which of its chunks have reached this owner."""
        wire, group = self._wires[bucket.index], self._reports[bucket.index]
        spans = bucket.spans
        arrived_masks = []
        for rank in group.ranks:
            if rank == group.transport.rank or not round_.up:
                arrived_masks.append(torch.ones(wire.chunks(spans[group.rank][1]), dtype=torch.uint8, device="cpu"))
            else:
                arrived_masks.append(round_.up[0].mask(rank).to(torch.uint8))
        # A missing report counts as "not arrived".
        round_.known_C = [torch.zeros(wire.chunks(count), dtype=torch.uint8, device="cpu") for _, count in spans]
        return collectives.all_to_all(group, round_.known_C, arrived_masks)

    # --- ending -------------------------------------------------------------------------------------------------------

    def finish(self, bucket: Bucket) -> None:
        """Waits until a bucket's vector holds the answers as the policy accepts them."""
        round_ = self._rounds.pop(bucket.index)
        vector, host = self._vectors(bucket)
        name = "all_reduce wait" if round_.fused else "exchange wait"
        with profiler_range(name, bucket.index, vector.numel(), self._wires[bucket.index].dtype):
            begun = round_.begun.result() if isinstance(round_.begun, Future) else round_.begun
            arrivals = [arrival for each in begun for arrival in each.wait()]
        if round_.fused:
            for arrival in arrivals:
                # Counts are per rank of the session's group, not per position in this round's order.
                self.up.add(self._all, arrival)
                self._count(arrival)
                self.down.add(self._all, arrival, stage=1)
        elif round_.participation.takes:
            if bucket.is_staged and self._policy.delay:
                host.copy_(bucket.taken(vector))  # training has continued since the exchange began
            if self._policy.exchanges_in_pairs:
                self._accept_pair(bucket, host, round_, arrivals)
            else:
                self._accept(bucket, host, round_, arrivals)
        if bucket.is_staged:
            bucket.copy_from_host(vector, host)

    def _accept(
        self, bucket: Bucket, host: torch.Tensor, round_: _BucketExchange, arrivals: list[ExchangeResult]
    ) -> None:
        """Accepts each owner's answer, this rank's own also in its encoded form: all ranks get the same values."""
        wire, group = self._wires[bucket.index], round_.group
        for arrival in round_.up:
            self.up.add(self._all, arrival)
            self._count(arrival)
        answer = arrivals[0] if arrivals else None
        if answer is not None:
            self.down.add(self._all, answer)
        if self._follows and len(arrivals) > 2 and arrivals[2].arrived == 1.0 and round_.combined.numel():
            self._update(self._memories.followed(bucket.index), wire.per_chunk, round_.combined)
        if self._policy.reports:
            self._report_to_policy(bucket, round_)
        spans = bucket.spans
        self._memories.arrived = 1.0
        if answer is not None:
            chunks, mine = sum(each for each, _ in answer.links().values()), self._answers[bucket.index]
            own_chunks = mine.chunks(spans[group.rank][1])
            self._memories.arrived = (answer.arrived * chunks + own_chunks) / (chunks + own_chunks)
        for owner, (own, buffer) in enumerate(zip(bucket.shards(host), round_.receive_buffers, strict=True)):
            if not own.numel():
                continue
            if owner == group.rank or answer is None:
                arrived_C = torch.ones(self._answers[bucket.index].chunks(own.numel()), dtype=torch.bool, device="cpu")
            else:
                arrived_C = answer.mask(group.ranks[owner])
            self._take(bucket, own, buffer, arrived_C, spans[owner][0])

    def _accept_pair(
        self, bucket: Bucket, host: torch.Tensor, round_: _BucketExchange, arrivals: list[ExchangeResult]
    ) -> None:
        wire, group = self._wires[bucket.index], round_.group
        chunks = wire.chunks(host.numel())
        if not round_.receive_buffers:
            self._take(bucket, host, wire.room(host.numel()), torch.zeros(chunks, dtype=torch.bool, device="cpu"), 0)
            return
        received = arrivals[-1]
        self.down.add(self._all, received)
        self._take(bucket, host, round_.receive_buffers[0], received.mask(group.ranks[round_.participation.partner]), 0)

    def _report_to_policy(self, bucket: Bucket, round_: _BucketExchange) -> None:
        """Reports to the policy which of this rank's chunks have reached their owners."""
        wire, policy = self._wires[bucket.index], self._policy
        for part, known_C, (first, count) in zip(round_.parts, round_.known_C, bucket.spans, strict=True):
            memory = self._memories.rank(bucket.index, first)
            assert memory is not None
            sent = part if round_.messages else wire.rounded(part.float(), round_.seed)
            for begin, end, chunks in windows(count, wire.per_chunk):
                rows = chunks.stop - chunks.start
                rank = memory(begin, rows, (end - begin) // rows)
                policy.sent(rank, sent[begin:end].view(rows, -1), known_C[chunks].bool().unsqueeze(-1))

    def _take(
        self, bucket: Bucket, own: torch.Tensor, buffer: torch.Tensor, arrived_C: torch.Tensor, first: int
    ) -> None:
        """Accepts the chunks of one message that arrived."""
        wire, policy = self._answers[bucket.index], self._policy
        keeps = self._keeps and wire.dtype != bucket.dtype
        if not (self._accepts or keeps):
            wire.place(buffer, own, arrived_C)
            return
        received = torch.full_like(own, torch.nan)  # exposes a policy that uses lost chunks
        wire.place(buffer, received, arrived_C)
        if keeps:
            received += own - own.to(wire.dtype)
        memory = self._memories.rank(bucket.index, first) if takes_rank(policy.accept) else None
        own.copy_(chunked(policy.accept, wire.per_chunk, [own, received], [arrived_C], memory))

    def _count(self, arrival: ExchangeResult) -> None:
        counts = arrival.counts()
        if counts.numel():
            self._copies += float(counts.sum())
            self._inverse += float(counts.reciprocal().sum())
            self._chunks += counts.numel()
            self.effective_batch = self._copies / (self._all.size * self._chunks)
            self.variance_inflation = self._all.size * self._inverse / self._chunks

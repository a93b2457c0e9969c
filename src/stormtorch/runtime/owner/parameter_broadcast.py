"""Stage 2, the all-gather: owners broadcast their parameters, with a lead. A copy whose update is lost grows stale."""

import contextlib
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from functools import partial

import torch

from stormtorch import collectives
from stormtorch.collectives import Group, Pending
from stormtorch.collectives.base.group import NodeLayout
from stormtorch.collectives.wire import Wire, narrower
from stormtorch.exchange.exchange import ExchangeResult
from stormtorch.exchange.reliability import Reliability
from stormtorch.policies import rules
from stormtorch.policies.policy import OwnerPolicy, overrides
from stormtorch.runtime.memory.arrival_counts import ArrivalCounts
from stormtorch.runtime.memory.bucket import Bucket
from stormtorch.runtime.memory.chunked import chunked
from stormtorch.runtime.owner.hierarchical_broadcast import BucketArrivals, Fetch, HierarchicalBroadcast
from stormtorch.runtime.session.profiling import profiler_range
from stormtorch.runtime.session.relays import Relays
from stormtorch.staging.launch_queue import LaunchQueue


class ParameterBroadcast:
    """The all-gathers of one session, and the age of each copy.

    Args:
        groups: One group per bucket.
        policy: Says what owners send, and how ranks use what arrives.
        buckets: Buckets that hold the parameters.
        order: Starts exchanges once data has left the GPU.
        relays: Forward what arrived from other machines.
        node_layout: Layout of each group over machines for a hierarchical broadcast; None for a flat one.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        policy: OwnerPolicy,
        buckets: Sequence[Bucket],
        order: LaunchQueue,
        relays: Relays,
        node_layout: Sequence[NodeLayout] | None = None,
    ) -> None:
        self.links = ArrivalCounts(groups[0].size)
        """Chunks that arrived from each peer in the last exchange."""
        self.fetched = 0
        """Number of chunks that were fetched exactly in the last exchange."""
        self._repaired = 0
        self.groups = groups
        self._policy = policy
        self._publishes, self._accepts = overrides(policy, "publish"), overrides(policy, "accept")
        self._buckets = buckets
        self._order = order
        self._size, self._rank = groups[0].size, groups[0].rank
        chunk_bytes = groups[0].transport.chunk_bytes
        self.wires = [Wire(narrower(policy.wire, bucket.dtype), chunk_bytes) for bucket in buckets]
        """Number format of each bucket."""
        counts = [[self.wires[bucket.index].chunks(count) for _, count in bucket.spans] for bucket in buckets]
        together = torch.zeros(sum(map(sum, counts)), dtype=torch.int32, device="cpu")
        parts = iter(torch.split(together, [count for each in counts for count in each]))
        self.ages = [[next(parts) for _ in each] for each in counts]
        """Age in steps of the copy of each chunk, by bucket and owner."""
        self._all_ages = together.numpy()  # the same memory, so that one check is enough where nothing was lost
        self._begun: dict[int, Future[Sequence[Pending]] | Sequence[Pending]] = {}
        self._receive_buffers: dict[int, list[torch.Tensor]] = {}
        self._fetches: dict[int, list[Fetch]] = {}
        self._serves: dict[int, list[Pending]] = {}
        self._hierarchical = None if node_layout is None else HierarchicalBroadcast(node_layout, self.wires, relays)

    # --- sending ----------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Resets all counts."""
        self.links.clear()
        self.fetched = 0
        self._repaired = 0

    def send(
        self,
        bucket: Bucket,
        lead: float,
        reliability: Reliability,
        seed: int,
        serve: Sequence[torch.Tensor | None] = (),
        fetch: Sequence[torch.Tensor | None] = (),
    ) -> None:
        """Begins to send a bucket's owned parameters and to receive the others.

        Args:
            bucket: The bucket.
            lead: Updates by which the owned parameters are extrapolated.
            reliability: How much may be missing.
            seed: Seed of the offsets of the wire's grids.
            serve: For each rank, flags of this rank's chunks to send to it exactly in addition.
            fetch: For each rank, flags of its chunks to receive from it exactly in addition.
        """
        with self._profiler_range("all_gather", bucket):
            self._begun[bucket.index] = self._send(bucket, lead, reliability, seed, serve, fetch)

    def _send(
        self,
        bucket: Bucket,
        lead: float,
        reliability: Reliability,
        seed: int,
        serve: Sequence[torch.Tensor | None],
        fetch: Sequence[torch.Tensor | None],
    ) -> Future[Sequence[Pending]] | Sequence[Pending]:
        wire = self.wires[bucket.index]
        ahead = self._published(bucket, lead)
        bucket.settle()
        events = []
        if bucket.is_staged:
            count = bucket.spans[self._rank][1]
            ahead, there = torch.empty(count, dtype=ahead.dtype, pin_memory=bucket.on_gpu, device="cpu"), ahead
            events = bucket.fetch(ahead, there)
            if self._hierarchical is not None:
                events += bucket.fetch(bucket.shard(bucket.host_flat, self._rank), bucket.own)

        def begin() -> list[Pending]:
            message = wire.encode(ahead, seed)
            if self._hierarchical is not None:
                # Nothing is lost inside a machine, so its ranks need no lead and no narrow format: they receive what
                # the owner itself has, unless the policy publishes something else.
                near = ahead.to(bucket.dtype) if self._publishes else bucket.shard(bucket.host_flat, self._rank)
                fetches = partial(self._begin_exact, bucket, ahead, serve, fetch, reliability)
                ages = self.ages[bucket.index]
                return [self._hierarchical.begin(bucket, message, near, reliability, fetches, ages)]
            receive_buffers = bucket.shards(bucket.host_flat)
            if wire.dtype != bucket.dtype or self._accepts:
                receive_buffers = [wire.room(shard.numel()) for shard in receive_buffers]
            # This rank's own slot holds the message itself: owners keep the parameters that they have.
            receive_buffers[self._rank] = message
            self._receive_buffers[bucket.index] = receive_buffers
            group = self.groups[bucket.index]
            pending = collectives.all_gather(group, receive_buffers, message, reliability=reliability)
            self._fetches[bucket.index] = self._begin_exact(bucket, ahead, serve, fetch, reliability)
            return [pending]

        return self._order.begin(begin, events)  # type: ignore[return-value]  # it holds what `begin` returns

    def _published(self, bucket: Bucket, lead: float) -> torch.Tensor:
        """Returns this rank's parameters as they are sent, in memory that does not change until the broadcast ends."""
        before = bucket.previous
        if before is None or (lead == 0.0 and not self._publishes):
            return bucket.masters
        per_chunk = self.wires[bucket.index].per_chunk
        return chunked(self._policy.publish, per_chunk, [before, bucket.masters], [lead])

    def looks_back(self, lead: float) -> bool:
        """Whether the message depends on the parameters before the step."""
        return lead != 0.0 or self._publishes

    def _profiler_range(self, what: str, bucket: Bucket) -> contextlib.AbstractContextManager[object]:
        return profiler_range(what, bucket.index, bucket.travels, self.wires[bucket.index].dtype)

    def _begin_exact(
        self,
        bucket: Bucket,
        ahead: torch.Tensor,
        serve: Sequence[torch.Tensor | None],
        fetch: Sequence[torch.Tensor | None],
        reliability: Reliability,
    ) -> list[Fetch]:
        """Begins to send the chunks that other ranks have requested exactly, and to fetch those that this rank has."""
        self._serves[bucket.index] = []
        if all(each is None for each in (*serve, *fetch)):
            return []
        group, wire = self.groups[bucket.index], self.wires[bucket.index]
        # The deadline matters if only one side knows of the request, because its report was lost with a rank.
        silence_s = getattr(group.transport, "silence_s", None)
        certain = Reliability(budget=1e-9, deadline_s=reliability.deadline_s or silence_s)
        fetches: list[Fetch] = []
        for peer, chunks_C in enumerate(serve):
            if chunks_C is not None and bool(chunks_C.any()):
                message = ahead[_elements(chunks_C, wire.per_chunk, ahead.numel())]
                self._serves[bucket.index].append(
                    collectives.send(group, message, peer, tag=bucket.index, reliability=certain)
                )
        for owner, chunks_C in enumerate(fetch):
            if chunks_C is not None and bool(chunks_C.any()):
                where = _elements(chunks_C, wire.per_chunk, bucket.spans[owner][1])
                message = torch.empty(where.numel(), dtype=torch.float32, device="cpu")
                pending = collectives.receive(group, message, owner, tag=bucket.index, reliability=certain)
                fetches.append(Fetch(owner, where, message, pending))
        return fetches

    # --- receiving --------------------------------------------------------------------------------------------------

    def receive(self, bucket: Bucket) -> None:
        """Waits until a bucket's parameters have arrived or are lost."""
        begun = self._begun.pop(bucket.index)
        with self._profiler_range("all_gather wait", bucket):
            (pending,) = begun.result() if isinstance(begun, Future) else begun
            arrivals = pending.wait()
        if self._hierarchical is not None:
            self._apply_received(bucket, self._hierarchical.receive(bucket))
        else:
            receive_buffers = self._receive_buffers.pop(bucket.index)
            for arrival in arrivals:
                self._repaired += arrival.repaired
                self.links.add(self.groups[bucket.index], arrival)
                self._apply_arrival(bucket, receive_buffers, arrival)
            for fetch in self._fetches.pop(bucket.index):
                chunks_C = fetch.place(bucket, self.wires[bucket.index].per_chunk)
                if chunks_C is not None:
                    self.ages[bucket.index][fetch.owner][chunks_C] = 0
                    self.fetched += chunks_C.numel()
        for serving in self._serves.pop(bucket.index):
            serving.wait()
        if bucket.is_staged:
            bucket.copy_others_from_host()

    def _apply_received(self, bucket: Bucket, received: BucketArrivals) -> None:
        """Counts what a hierarchical broadcast delivered. The values are in the bucket already."""
        for arrival in received.inter_machine:
            self._repaired += arrival.repaired
            self.links.add(self.groups[bucket.index], arrival)
        for owner, fresh_C in received.fresh.items():
            rules.advance_ages(self.ages[bucket.index][owner], fresh_C)
        for owner, reported_C in received.ages.items():
            ages_C = self.ages[bucket.index][owner]
            ages_C.add_(1) if reported_C is None else ages_C.copy_(reported_C)
        self.fetched += received.fetched

    def _apply_arrival(self, bucket: Bucket, receive_buffers: list[torch.Tensor], arrival: ExchangeResult) -> None:
        group, wire = self.groups[bucket.index], self.wires[bucket.index]
        links = arrival.links()
        for owner in range(self._size):
            if owner == self._rank:
                continue
            chunks, arrived = links[group.ranks[owner]]
            ages_C = self.ages[bucket.index][owner]
            if arrived == chunks:
                ages_C.zero_()
                if not self._accepts and wire.dtype == bucket.dtype:
                    continue  # received in place
                arrived_C = torch.ones(chunks, dtype=torch.bool, device="cpu")
            else:
                arrived_C = arrival.mask(group.ranks[owner])
                rules.advance_ages(ages_C, arrived_C)
            own = bucket.shard(bucket.host_flat, owner)
            if self._accepts:
                received = torch.full_like(own, torch.nan)  # so that a policy that uses lost values is found at once
                wire.place(receive_buffers[owner], received, arrived_C)
                own.copy_(chunked(self._policy.accept, wire.per_chunk, [own, received], [arrived_C]))
            elif wire.dtype != bucket.dtype:
                wire.place(receive_buffers[owner], own, arrived_C)

    def retransmitted(self, missing: Collection[int]) -> tuple[int, int]:
        """Estimates the loss of this rank's last broadcast from its retransmissions: chunks lost, and chunks sent.

        The estimate tends to be too high, as a lost acknowledgement also causes a retransmission. If a rank is missing,
        both are 0: what was sent to that rank says nothing about the network.
        """
        if missing:
            return 0, 0
        receivers = self._size - 1 if self._hierarchical is None else len(self._hierarchical.sources)
        return self._repaired, self.chunks_of(self._rank) * receivers + self._repaired

    # --- ages -------------------------------------------------------------------------------------------------------

    def chunks_of(self, owner: int) -> int:
        """Returns the number of chunks in an owner's shards."""
        return sum(ages[owner].numel() for ages in self.ages)

    def would_exceed_lag(self, owner: int, most: int) -> torch.Tensor:
        """Whether each chunk of an owner's shards, over all buckets, would be older than `most` after another loss.

        All are False if another rank of this machine receives and fetches them for the machine.
        """
        if self._hierarchical is not None and owner not in self._hierarchical.sources:
            return torch.zeros(self.chunks_of(owner), dtype=torch.bool, device="cpu")
        return rules.overdue(torch.cat([ages[owner] for ages in self.ages]), most)

    def split(self, chunks_C: torch.Tensor, owner: int) -> list[torch.Tensor]:
        """Splits flags of all chunks of an owner by bucket."""
        return list(torch.split(chunks_C, [ages[owner].numel() for ages in self.ages]))

    def received(self, owner: int) -> list[bool]:
        """Returns whether any chunk of an owner's shards arrived in the last exchange, by bucket."""
        return [bool((ages[owner] == 0).any()) for ages in self.ages]

    def lag(self) -> dict[int, int]:
        """Returns the number of chunks of others' parameters by their age in steps."""
        if not self._all_ages.any():
            count = self._all_ages.size - self.chunks_of(self._rank)
            return {0: count} if count else {}
        others = [age for ages in self.ages for owner, age in enumerate(ages) if owner != self._rank]
        counts = torch.bincount(torch.cat(others))
        return {age: count for age, count in enumerate(counts.tolist()) if count}

    def oldest(self, without: Collection[int]) -> int:
        """Returns the age of the oldest copy, leaving out the shards of some owners."""
        if not self._all_ages.any():
            return 0
        spared = {*without, self._rank}
        return max(
            (int(age.max()) for ages in self.ages for owner, age in enumerate(ages) if owner not in spared), default=0
        )

    def oldest_of(self, owner: int) -> int:
        """Returns the age of the oldest copy of an owner's shards."""
        return max((int(ages[owner].max()) for ages in self.ages if ages[owner].numel()), default=0)

    def refresh(self, bucket: Bucket, group: Group, arrival: ExchangeResult) -> None:
        """Sets the age of all copies that arrived in an exact exchange to 0."""
        for rank, (chunks, arrived) in arrival.links().items():
            if arrived == chunks:
                self.ages[bucket.index][group.ranks.index(rank)].zero_()


def _elements(chunks_C: torch.Tensor, per_chunk: int, count: int) -> torch.Tensor:
    """Returns the indices of the elements in some chunks of a shard with `count` elements."""
    first = chunks_C.nonzero() * per_chunk
    each = (first + torch.arange(per_chunk, device="cpu")).flatten()
    return each[each < count]

"""Stage 1, the reduce-scatter: sends each bucket's gradients to their owners once complete, and averages arrivals."""

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch

from stormtorch import collectives
from stormtorch.collectives import Group, Op, Pending
from stormtorch.collectives.base.group import NodeLayout
from stormtorch.collectives.wire import Wire, narrower
from stormtorch.exchange.reliability import Reliability
from stormtorch.policies.bounded_drift import BoundedDrift
from stormtorch.policies.memory import MemoryStore
from stormtorch.policies.policy import OwnerPolicy, takes
from stormtorch.runtime.memory.arrival_counts import ArrivalCounts
from stormtorch.runtime.memory.bucket import Bucket
from stormtorch.runtime.memory.chunked import ChunkMemory, chunked
from stormtorch.runtime.session.profiling import profiler_range
from stormtorch.runtime.session.relays import Relays
from stormtorch.staging.launch_queue import LaunchQueue


class GradientReduction:
    """The reduce-scatters of one session.

    Args:
        groups: One group per bucket, so that buckets may start in any order.
        policy: Says how much may be lost, and how arrivals are weighed.
        buckets: Buckets that hold the gradients.
        order: Starts exchanges once data has left the GPU.
        relays: Begins the exchanges between machines when those inside a machine have ended.
        node_layout: Layout of each group over machines for a hierarchical reduce-scatter; None for a flat one.
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
        self.effective_batch = 1.0
        self.variance_inflation = 1.0
        self.losses = [0.0] * groups[0].size
        """Loss of this rank's gradients at each owner, as that owner reports it; `Policy.send` may weigh by it."""
        self.present = groups[0].size
        """Number of live ranks, as far as is known; passed to `Policy.combine`."""
        self._remembered: dict[int, MemoryStore] = {}
        self.contribution: Callable[[Bucket], torch.Tensor] = lambda bucket: bucket.host_grads
        """Returns this rank's contribution to a bucket: by default all gradients, unchanged."""
        self.reliability = policy.up
        """Reliability of the next exchange, with the parity that this rank sends."""
        self.groups = groups
        self._policy = policy
        self._keeps_mean = type(policy).combine in (OwnerPolicy.combine, BoundedDrift.combine)
        """Whether `Policy.combine` leaves an unweighted mean as it is. Then it is not called, which saves time."""
        self._remembers = takes(policy.combine, "owner")
        chunk_bytes = groups[0].transport.chunk_bytes
        self._wires = [Wire(narrower(policy.wire, bucket.dtype), chunk_bytes) for bucket in buckets]
        self._buckets = buckets
        self._order = order
        self._relays = relays
        self._islands = node_layout
        self._begun: dict[int, Future[Sequence[Pending]] | Sequence[Pending]] = {}

    def start(self, bucket: Bucket) -> None:
        """Begins to send a bucket's gradients."""
        reliability = self.reliability
        with self._profiler_range("reduce_scatter", bucket):
            events = bucket.fetch(bucket.host_grads, bucket.grads) if bucket.is_staged else []
            begun = self._order.begin(lambda: [self._reduce(bucket, reliability)], events)
        self._begun[bucket.index] = begun  # type: ignore[assignment]  # it holds what `_reduce` returns

    def _profiler_range(self, what: str, bucket: Bucket) -> contextlib.AbstractContextManager[object]:
        return profiler_range(what, bucket.index, bucket.travels, self._wire(bucket).dtype)

    def finish(self) -> None:
        """Waits until this rank's shards are averaged."""
        self.links.clear()
        copies = inverse = chunks = 0.0
        # A contribution of another machine is the mean of its ranks.
        each = self._islands[0].each if self._islands else 1
        for bucket in self._buckets:
            begun = self._begun.pop(bucket.index)
            with self._profiler_range("reduce_scatter wait", bucket):
                (pending,) = begun.result() if isinstance(begun, Future) else begun
                arrivals = pending.wait()
            group = self.groups[bucket.index]
            for arrival in arrivals:
                self.links.add(group, arrival)
                alike, of = arrival.count
                if alike:
                    copies += alike * each * of
                    inverse += of / (alike * each)
                    chunks += of
                elif of:
                    counts = arrival.counts() * each
                    copies += float(counts.sum())
                    inverse += float(counts.reciprocal().sum())
                    chunks += of
                if of and not (self._keeps_mean and not self._policy.weighs):
                    self._combine(bucket, arrival.counts() * each)
            if bucket.is_staged:
                bucket.copy_from_host(bucket.own_grads, bucket.host_own_grads)
        n = self.groups[0].size
        self.effective_batch = copies / (n * chunks) if chunks else 1.0
        self.variance_inflation = n * inverse / chunks if chunks else 1.0

    def abort(self) -> None:
        """Aborts all exchanges in flight. Afterwards, the caller may write to their memory."""
        begun = [each.result() if isinstance(each, Future) else each for each in self._begun.values()]
        pendings = [pending for each in begun for pending in each]
        for pending in pendings:
            pending.stop()  # stop all before waiting for the first: relays are handled one after the other
        for pending in pendings:
            pending.cancel()
        self._begun.clear()

    def finite(self) -> bool:
        """Whether this rank's gradients are finite, also after conversion to the wire's number format."""
        sums: dict[torch.device, list[torch.Tensor]] = {}
        for bucket in self._buckets:
            grads = bucket.grads
            if self._wire(bucket).dtype == torch.float16 and grads.numel():
                largest = float(torch.linalg.vector_norm(grads, torch.inf))
                sent = self._policy.send(torch.tensor([[largest]], device="cpu"), max(self.losses))
                if not float(sent) <= torch.finfo(torch.float16).max:
                    return False
            elif bucket.finite is False:
                return False
            elif bucket.finite is None:
                sums.setdefault(grads.device, []).append(grads.sum(dtype=torch.float32))
        # A sum is twenty times as fast as a check of each element, and any element that is not finite makes it not
        # finite. Finite elements may overflow it, too, so only a sum that is not finite needs the slow check. All sums
        # of a GPU are checked together, as each check waits for the GPU.
        if all(bool(torch.stack(each).isfinite().all()) for each in sums.values()):
            return True
        return all(bool(bucket.grads.isfinite().all()) for bucket in self._buckets)

    def _wire(self, bucket: Bucket) -> Wire:
        return self._wires[bucket.index]

    def _reduce(self, bucket: Bucket, reliability: Reliability) -> Pending:
        if self._islands is not None:
            return self._reduce_by_machine(bucket, self._islands[bucket.index], reliability)
        group, wire, out = self.groups[bucket.index], self._wire(bucket), bucket.host_own_grads
        given = self.contribution(bucket)
        # Convert the whole bucket at once where possible: with many ranks, it has many small shards.
        if self._policy.weighs:
            losses = [0.0 if owner == group.rank else loss for owner, loss in enumerate(self.losses)]
            parts = [
                chunked(self._policy.send, wire.per_chunk, [part], [loss]).to(wire.reduces)
                for part, loss in zip(bucket.shards(given), losses, strict=True)
            ]
        else:
            parts = bucket.shards(given.to(wire.reduces))
        return wire.reduce_scatter(group, out, parts, Op.AVG, reliability=reliability)

    def _reduce_by_machine(self, bucket: Bucket, node_layout: NodeLayout, reliability: Reliability) -> Pending:
        """Averages first inside this machine, then over the ranks with this local rank on all machines."""
        wire, out = self._wire(bucket), bucket.host_own_grads
        parts, local_rank = bucket.shards(bucket.host_grads), node_layout.inside.rank
        # Reserved now, because relays may begin their second exchanges in another order on other ranks.
        inside, between = (
            node_layout.inside.reserve_ahead(len(node_layout.machines)),
            node_layout.between.reserve_ahead(1),
        )
        # In separate memory, as gradients must not change: see `Bucket`.
        means = [
            torch.empty(parts[ranks[local_rank]].numel(), dtype=torch.float32, device="cpu")
            for ranks in node_layout.machines
        ]
        first = [
            collectives.reduce_scatter(inside, mean, [parts[rank] for rank in ranks], Op.AVG)
            for mean, ranks in zip(means, node_layout.machines, strict=True)
        ]

        def then() -> list[Pending]:
            # The mean of means of equally many ranks is the mean.
            given = [mean.to(wire.reduces) for mean in means]
            return [wire.reduce_scatter(between, out, given, Op.AVG, reliability=reliability)]

        return self._relays.begin(first, then, node_layout.inside.ranks)

    def _combine(self, bucket: Bucket, counts_C: torch.Tensor) -> None:
        """Replaces the mean of the arrived gradients by the result of `Policy.combine`."""
        out = bucket.host_own_grads
        memory: ChunkMemory | None = None
        if self._remembers:
            memory = self._remembered.setdefault(bucket.index, MemoryStore(out.numel())).chunks
        per_chunk = self._wire(bucket).per_chunk
        combined = chunked(self._policy.combine, per_chunk, [out], [counts_C, self.present], memory)
        if combined is not out:
            out.copy_(combined)

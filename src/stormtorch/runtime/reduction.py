"""Stage 1: gradients to their owners, each bucket as soon as it is complete, averaged over what arrived."""

import contextlib
from collections.abc import Sequence
from concurrent.futures import Future

import torch

from stormtorch import collectives
from stormtorch.collectives import Group, Op, Pending
from stormtorch.collectives.wire import Wire
from stormtorch.policies import rules
from stormtorch.policies.policy import BoundedDrift
from stormtorch.reliability import Reliability
from stormtorch.runtime.arrivals import Links
from stormtorch.runtime.bucket import Bucket
from stormtorch.runtime.profiling import shown
from stormtorch.staging.order import Order


class Reduction:
    """The reduce-scatters of one training.

    Args:
        groups: One per bucket, so that buckets may start in any order.
        policy: What may be lost, and how the rest is weighed.
        buckets: Whose gradients.
        order: Starts exchanges when data has left the GPU.
    """

    def __init__(self, groups: Sequence[Group], policy: BoundedDrift, buckets: Sequence[Bucket], order: Order) -> None:
        self.links = Links(groups[0].size)
        """What arrived of whom, last time."""
        self.effective_batch = 1.0
        self.variance_inflation = 1.0
        self.losses = [0.0] * groups[0].size
        """Of this rank's gradients at each owner, as that one tells; for weights by the chance to arrive."""
        self.present = groups[0].size
        """Ranks that are there, as far as is known: the weights of those that are missing go to the others."""
        self.groups = groups
        self._policy = policy
        self._buckets = buckets
        self._order = order
        self._begun: dict[int, Future[Sequence[Pending]] | Sequence[Pending]] = {}

    def start(self, bucket: Bucket) -> None:
        """Begins to send a bucket's gradients."""
        with self._shown("reduce_scatter", bucket):
            moments = bucket.fetch(bucket.host_grads, bucket.grads) if bucket.on_gpu else []
            begun = self._order.begin(lambda: [self._reduce(bucket, self._policy.gradients)], moments)
        self._begun[bucket.index] = begun  # type: ignore[assignment]  # of what our own function returns

    def _shown(self, what: str, bucket: Bucket) -> contextlib.AbstractContextManager[object]:
        return shown(what, bucket.index, bucket.layout.elements, self._wire(bucket))

    def finish(self) -> None:
        """Waits until this rank's shards are averaged."""
        self.links.clear()
        copies = inverse = chunks = 0.0
        for bucket in self._buckets:
            begun = self._begun.pop(bucket.index)
            with self._shown("reduce_scatter wait", bucket):
                (pending,) = begun.result() if isinstance(begun, Future) else begun
                arrivals = pending.wait()
            group = self.groups[bucket.index]
            for arrival in arrivals:
                self.links.add(group, arrival)
                counts = arrival.counts()
                if counts.numel():
                    copies += float(counts.sum())
                    inverse += float(counts.reciprocal().sum())
                    chunks += counts.numel()
                    self._weigh(bucket, counts)
            if bucket.on_gpu:
                bucket.bring(bucket.own_grads, bucket.host_own_grads)
        n = self.groups[0].size
        self.effective_batch = copies / (n * chunks) if chunks else 1.0
        self.variance_inflation = n * inverse / chunks if chunks else 1.0

    def finite(self, bucket: Bucket) -> bool:
        """Whether this rank's gradients are, also as they are sent: float16 ends early."""
        grads = bucket.grads
        if self._wire(bucket) == torch.float16 and grads.numel():
            largest = float(torch.linalg.vector_norm(grads, torch.inf))
            weight = rules.chance_weight(max(self.losses)) if self._by_chance else 1.0
            return largest * weight <= torch.finfo(torch.float16).max
        # One number that is not finite makes the sum so, and a sum is twenty times as fast as looking at each. Finite
        # ones may overflow it: then each is looked at.
        return bool(grads.sum(dtype=torch.float32).isfinite()) or bool(grads.isfinite().all())

    @property
    def _by_chance(self) -> bool:
        return self._policy.weights == "horvitz-thompson" and not self._policy.gradients.exact

    def _wire(self, bucket: Bucket) -> torch.dtype:
        wire = self._policy.wire
        return wire if wire.itemsize < bucket.dtype.itemsize else bucket.dtype

    def _reduce(self, bucket: Bucket, reliability: Reliability) -> Pending:
        group, wire, out = self.groups[bucket.index], self._wire(bucket), bucket.host_own_grads
        grads = bucket.host_grads
        if self._by_chance:
            grads = grads.clone()
            for owner, loss in enumerate(self.losses):
                if owner != group.rank:
                    bucket.shard(grads, owner).mul_(rules.chance_weight(loss))
        if wire == torch.int8:
            parts = bucket.shards(grads.float())
            return collectives.reduce_scatter_int8(group, out, parts, Op.AVG, reliability=reliability)
        parts = bucket.shards(grads.to(wire))
        return collectives.reduce_scatter(group, out, parts, Op.AVG, reliability=reliability)

    def _weigh(self, bucket: Bucket, counts_C: torch.Tensor) -> None:
        """Senders have scaled by the inverse chance, so what counts is the sum over all ranks, lost parts as zero."""
        if not self._by_chance:
            return
        group = self.groups[bucket.index]
        wire = Wire(self._wire(bucket), group.transport.chunk_bytes)
        out = bucket.host_own_grads
        factor_C = rules.share_of_all(counts_C, self.present)
        out.mul_(factor_C.repeat_interleave(wire.per_chunk)[: out.numel()])

"""The full state for checkpoints and exact models, all-gathered from shards: parameters, buffers, optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from stormtorch import collectives
from stormtorch.collectives import Group
from stormtorch.collectives.base.objects import complete
from stormtorch.exchange.exchange import ExchangeResult
from stormtorch.runtime.members.prepared_optimizer import plain_state
from stormtorch.runtime.members.served_collectives import OPTIMIZER_STATE
from stormtorch.runtime.memory.bucket import Bucket
from stormtorch.runtime.memory.sharded_optimizer import ShardedOptimizer
from stormtorch.runtime.owner.parameter_broadcast import ParameterBroadcast
from stormtorch.runtime.session.buffers import Buffers


class FullStateGather:
    """Gathers the owners' parameters and optimizer state on all ranks.

    Args:
        members_group: The members of the view.
        optimizer: The user's optimizer, prepared.
        buckets: Buckets that hold the parameters.
        shards: This rank's shard of the optimizer.
        broadcast: Keeps the ages of copies.
        buffers: Buffers of the model.
    """

    def __init__(
        self,
        members_group: Group,
        optimizer: torch.optim.Optimizer,
        buckets: Sequence[Bucket],
        shards: ShardedOptimizer,
        broadcast: ParameterBroadcast,
        buffers: Buffers,
    ) -> None:
        self._members_group = members_group
        self._optimizer = optimizer
        self._buckets = buckets
        self._shards = shards
        self._broadcast = broadcast
        self._buffers = buffers

    def gather_parameters(self, group: Group) -> None:
        """Gathers the owners' parameters and averages all buffers. A collective: all ranks must call it.

        Raises:
            Interrupted: A rank is gone, and another view begins without it.
        """
        for bucket in self._buckets:
            receive_buffers = bucket.shards(bucket.host_flat)
            own = receive_buffers[self._members_group.rank]
            if bucket.is_staged:
                own.copy_(bucket.taken(bucket.own))
            for arrival in complete(collectives.all_gather(group, receive_buffers, own), group):
                self._broadcast.refresh(bucket, group, arrival)
            if bucket.is_staged:
                bucket.copy_others_from_host()
        self._buffers.average(group)

    def serve_call(self, call: int, group: Group) -> object:
        """Serves a call of other ranks. Changes nothing here, as this rank may be in the middle of a step.

        Raises:
            Interrupted: A rank is gone, and another view begins without it.
        """
        if call == OPTIMIZER_STATE:
            return self._shards.gather(plain_state(self._optimizer), group)
        shared: list[tuple[list[torch.Tensor], list[ExchangeResult]]] = []
        for bucket in self._buckets:
            if bucket.on_gpu:
                torch.cuda.synchronize(bucket.device)  # the step may run on another stream than this thread's
            own = bucket.taken(bucket.own)
            receive_buffers = [own.new_empty(count) for _, count in bucket.spans]
            receive_buffers[self._members_group.rank] = own
            shared.append((receive_buffers, complete(collectives.all_gather(group, receive_buffers, own), group)))
        return shared, self._buffers.contribute(group)

    def follow(self, kept: Any, group: Group) -> None:
        """Adopts the parameters and buffers that `serve_call` returned."""
        shared, mean = kept
        for bucket, (receive_buffers, arrivals) in zip(self._buckets, shared, strict=True):
            for owner, received in enumerate(receive_buffers):
                if owner != self._members_group.rank:
                    bucket.shard(bucket.host_flat, owner).copy_(received)
            for arrival in arrivals:
                self._broadcast.refresh(bucket, group, arrival)
            if bucket.is_staged:
                bucket.shard(bucket.host_flat, self._members_group.rank).copy_(bucket.taken(bucket.own))
                bucket.copy_others_from_host()
        self._buffers.set_mean(mean)

    def optimizer_state(self, local: dict[str, Any], kept: object, group: Group) -> dict[str, Any]:
        """Returns the state dict of the whole optimizer, gathered from all owners.

        Args:
            local: State dict of this rank's shard.
            kept: What `serve_call` returned, if this rank has already served this call; otherwise None.
            group: Group of the exchange.

        Raises:
            Interrupted: A rank is gone, and another view begins without it.
        """
        if kept is None:
            return self._shards.gather(local, group)
        # Each rank has its own settings, and a scheduler may have changed them since it served the call.
        whole: dict[str, Any] = kept  # type: ignore[assignment]  # of `serve_call`
        groups = zip(local["param_groups"], whole["param_groups"], strict=True)
        return {
            **whole,
            **{name: value for name, value in local.items() if name != "state"},
            "state": whole["state"] | self._shards.personal_state(local),
            "param_groups": [{**own, "params": each["params"]} for own, each in groups],
        }

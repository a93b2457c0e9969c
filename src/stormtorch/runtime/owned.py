"""What owners share in calls that all ranks make: their parameters, and their parts of the optimizer's state."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from stormtorch import collectives
from stormtorch.collectives import Group
from stormtorch.errors import StormError
from stormtorch.runtime.broadcast import Broadcast
from stormtorch.runtime.bucket import Bucket
from stormtorch.runtime.buffers import Buffers
from stormtorch.runtime.calls import OPTIMIZER_STATE
from stormtorch.runtime.prepared import Prepared
from stormtorch.runtime.rounds import Rounds
from stormtorch.runtime.shards import Shards
from stormtorch.transport.exchange import Arrival

_log = logging.getLogger("stormtorch")


class Owned:
    """Shares the owners' parameters and optimizer state with all ranks.

    Args:
        group: All ranks.
        optimizer: The user's optimizer, prepared.
        buckets: Buckets that hold the parameters.
        shards: This rank's part of the optimizer.
        broadcast: Keeps the ages of copies.
        buffers: Buffers of the model.
        rounds: Knows who is there, and the reliability of messages that must arrive.
    """

    def __init__(
        self,
        group: Group,
        optimizer: torch.optim.Optimizer,
        buckets: Sequence[Bucket],
        shards: Shards,
        broadcast: Broadcast,
        buffers: Buffers,
        rounds: Rounds,
    ) -> None:
        self._all = group
        self._optimizer = optimizer
        self._buckets = buckets
        self._shards = shards
        self._broadcast = broadcast
        self._buffers = buffers
        self._rounds = rounds

    def share(self, group: Group) -> None:
        """Gives every rank the owners' parameters and the mean of all buffers. All ranks must call it."""
        for bucket in self._buckets:
            rooms = bucket.shards(bucket.host_flat)
            own = rooms[self._all.rank]
            if bucket.on_gpu:
                own.copy_(bucket.own)
            for arrival in collectives.all_gather(group, rooms, own, reliability=self._rounds.certain).wait():
                self._broadcast.refresh(bucket, group, arrival)
            if bucket.on_gpu:
                bucket.flat.copy_(bucket.host_flat)
        self._buffers.average(group, self._rounds.certain, self._rounds.members.lowest)

    def take_part(self, call: int, present: list[int], group: Group) -> object:
        """Takes part in a call of other ranks. Changes nothing here, as this rank may be in the middle of a step."""
        if call == OPTIMIZER_STATE:
            self._need_all(present)
            return self._shards.gather(super(Prepared, self._optimizer).state_dict(), group)  # type: ignore[misc]
        shared: list[tuple[list[torch.Tensor], Arrival]] = []
        for bucket in self._buckets:
            if bucket.on_gpu:
                torch.cuda.synchronize(bucket.device)  # the step may run on another stream than this thread's
            own = bucket.own.to("cpu", copy=True)
            rooms = [own.new_empty(count) for _, count in bucket.layout.spans]
            rooms[self._all.rank] = own
            shared += [
                (rooms, arrival)
                for arrival in collectives.all_gather(group, rooms, own, reliability=self._rounds.certain).wait()
            ]
        return shared, self._buffers.give(group, self._rounds.certain, self._rounds.members.lowest)

    def follow(self, kept: Any, group: Group) -> None:
        """Takes over the parameters and buffers that `take_part` returned."""
        shared, mean = kept
        for bucket, (rooms, arrival) in zip(self._buckets, shared, strict=True):
            for rank, (chunks, arrived) in arrival.links().items():
                if arrived == chunks:
                    owner = group.ranks.index(rank)
                    bucket.shard(bucket.host_flat, owner).copy_(rooms[owner])
            self._broadcast.refresh(bucket, group, arrival)
            if bucket.on_gpu:
                bucket.shard(bucket.host_flat, self._all.rank).copy_(bucket.own)
                bucket.flat.copy_(bucket.host_flat)
        self._buffers.become(mean)

    def tell_age(self, missing: list[int]) -> None:
        """Warns of shards whose owners have left, and says how old this rank's copies are."""
        ages = [int(age.max()) for each in self._broadcast.ages for peer in missing if (age := each[peer]).numel()]
        _log.warning(
            "rank %d: rank %s takes no part any more: its shard of the parameters is as this rank last heard of it, at "
            "most %d steps before the last",
            *(self._all.rank, ", ".join(map(str, missing)), max(ages, default=0)),
        )

    def optimizer_state(self, local: dict[str, Any], present: list[int], kept: object, group: Group) -> dict[str, Any]:
        """Returns the state dict of the whole optimizer, gathered from all owners.

        Args:
            local: State dict of this rank's part.
            present: Ranks that take part.
            kept: What `take_part` returned, if this rank has already taken part in the call.
            group: Group of the exchange.
        """
        self._need_all(present)
        if kept is None:
            return self._shards.gather(local, group)
        # Each rank has settings of its own, and a scheduler may have changed them since it took part.
        whole: dict[str, Any] = kept  # type: ignore[assignment]  # of `take_part`
        groups = zip(local["param_groups"], whole["param_groups"], strict=True)
        return {
            **whole,
            **{name: value for name, value in local.items() if name != "state"},
            "param_groups": [{**own, "params": each["params"]} for own, each in groups],
        }

    def _need_all(self, present: list[int]) -> None:
        """Raises an error unless all ranks take part: nobody else has a rank's part of the optimizer's state."""
        missing = sorted(set(range(self._all.size)) - set(present))
        if missing:
            raise StormError(
                f"rank {self._all.rank}: optimizer.state_dict() needs what rank {', '.join(map(str, missing))} "
                "owns of the optimizer's state, and it takes no part any more: save before ranks leave"
            )

"""Stage 2 as a hierarchical all-gather: a shard crosses the network once per machine, and is forwarded inside it.

An owner sends its shard under the policy's reliability to the ranks with its local rank on other machines, and exactly
to all ranks of its own machine. A rank that receives from another machine stores what arrived, fetches overdue chunks,
and forwards its copy of the shard to the rest of its machine, exactly, with the ages of the chunks. So all ranks of a
machine have the same copies of what other machines own, with the same ages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from stormtorch import collectives
from stormtorch.collectives import Pending
from stormtorch.collectives.base.group import NodeLayout
from stormtorch.collectives.wire import Wire
from stormtorch.exchange.exchange import ExchangeResult
from stormtorch.exchange.reliability import Reliability
from stormtorch.runtime.memory.bucket import Bucket
from stormtorch.runtime.session.relays import Relay, Relays


@dataclass(frozen=True)
class Fetch:
    """Chunks of an owner's shard that this rank receives exactly, because its copies of them are too old."""

    owner: int
    where: torch.Tensor
    """Indices of the chunks' elements in the shard."""
    message: torch.Tensor
    pending: Pending

    def place(self, bucket: Bucket, per_chunk: int) -> torch.Tensor | None:
        """Waits for the chunks and copies them into the bucket. Returns their numbers; None if the owner is gone."""
        (arrival,) = self.pending.wait()
        if arrival.arrived < 1.0:
            return None
        bucket.shard(bucket.host_flat, self.owner)[self.where] = self.message.to(bucket.dtype)
        chunks_C: torch.Tensor = torch.unique(self.where // per_chunk)
        return chunks_C


@dataclass
class BucketArrivals:
    """What arrived of one bucket."""

    inter_machine: list[ExchangeResult] = field(default_factory=list)
    """Arrivals of the exchange between machines."""
    fresh: dict[int, torch.Tensor] = field(default_factory=dict)
    """For owners that sent their shards directly, whether each chunk is new, (C,)."""
    ages: dict[int, torch.Tensor | None] = field(default_factory=dict)
    """For owners whose shards were forwarded inside this machine, the age of each chunk, (C,); None if incomplete."""
    fetched: int = 0
    """Number of chunks that this rank has fetched exactly."""


@dataclass
class _BucketInFlight:
    """The exchanges of one bucket that are in flight."""

    inter_machine: Pending
    inside: Pending
    relay: Relay
    received: BucketArrivals
    ages: list[torch.Tensor]
    """For each rank of this machine, ages of the chunks that it forwards, shard by shard."""


class HierarchicalBroadcast:
    """The hierarchical broadcasts of one session.

    Args:
        node_layout: Layout of each bucket's group over machines.
        wires: Number format in which each bucket travels between machines.
        relays: Forward what arrived from other machines.
    """

    def __init__(self, node_layout: Sequence[NodeLayout], wires: Sequence[Wire], relays: Relays) -> None:
        self._islands = node_layout
        self._wires = wires
        self._relays = relays
        self._place, self._machines = node_layout[0].inside.rank, node_layout[0].machines
        self._machine = node_layout[0].between.rank
        self.sources = [ranks[self._place] for at, ranks in enumerate(self._machines) if at != self._machine]
        """Owners on other machines that send to this rank directly: those with the same local rank."""
        self._others = [ranks for at, ranks in enumerate(self._machines) if at != self._machine]
        self._in_flight: dict[int, _BucketInFlight] = {}

    def begin(
        self,
        bucket: Bucket,
        message: torch.Tensor,
        near: torch.Tensor,
        reliability: Reliability,
        fetches: Callable[[], Sequence[Fetch]],
        ages: Sequence[torch.Tensor],
    ) -> Relay:
        """Begins to send a bucket's owned parameters and to receive the others.

        Args:
            bucket: The bucket.
            message: The owned parameters as they travel between machines.
            near: The owned parameters as they travel inside this machine, in the bucket's dtype.
            reliability: How much may be missing between machines.
            fetches: Begins to fetch chunks whose copies are too old.
            ages: Ages of this rank's copies before this broadcast, by owner.
        """
        node_layout, wire, flat = self._islands[bucket.index], self._wires[bucket.index], bucket.host_flat
        mine = self._machines[self._machine]
        destinations = {owner: bucket.shard(flat, owner) for owner in self.sources}
        receive_buffers = destinations
        if wire.dtype != bucket.dtype:
            receive_buffers = {owner: wire.room(destination.numel()) for owner, destination in destinations.items()}
        around = [*receive_buffers.values()]
        around.insert(self._machine, message)
        # This rank's own slots hold the messages themselves: owners keep the parameters that they have.
        local_receive_buffers = [
            near if place == self._place else bucket.shard(flat, rank) for place, rank in enumerate(mine)
        ]
        later = node_layout.inside.reserve_ahead(len(self._others) + 1)
        inter_machine = collectives.all_gather(node_layout.between, around, message, reliability=reliability)
        inside = collectives.all_gather(node_layout.inside, local_receive_buffers, near)
        begun = fetches()
        received = BucketArrivals()
        chunks = [[wire.chunks(bucket.spans[ranks[place]][1]) for ranks in self._others] for place in range(len(mine))]
        sent_ages = [torch.zeros(sum(each), dtype=torch.int32, device="cpu") for each in chunks]

        def then() -> list[Pending]:
            received.inter_machine = inter_machine.wait()
            for owner, destination in destinations.items():
                received.fresh[owner] = _arrived(
                    received.inter_machine[0], node_layout.between.ranks[self._machine_of(owner)]
                )
                if wire.dtype != bucket.dtype:
                    wire.place(receive_buffers[owner], destination, received.fresh[owner])
            for fetch in begun:
                chunks_C = fetch.place(bucket, wire.per_chunk)
                if chunks_C is not None:
                    received.fresh[fetch.owner][chunks_C] = True
                    received.fetched += chunks_C.numel()
            # Ages may differ between ranks, as a rank that calls `exact` alone has the newest copies: send this rank's.
            grown = [(ages[owner] + 1).masked_fill_(received.fresh[owner], 0) for owner in destinations]
            torch.cat(grown, out=sent_ages[self._place])
            return [
                collectives.all_gather(later, sent_ages, sent_ages[self._place]),
                *(
                    collectives.all_gather(
                        later, [bucket.shard(flat, rank) for rank in ranks], destinations[ranks[self._place]]
                    )
                    for ranks in self._others
                ),
            ]

        relay = self._relays.begin([inter_machine, *(each.pending for each in begun)], then, node_layout.between.ranks)
        self._in_flight[bucket.index] = _BucketInFlight(inter_machine, inside, relay, received, sent_ages)
        return relay

    def _machine_of(self, owner: int) -> int:
        return next(at for at, ranks in enumerate(self._machines) if owner in ranks)

    def receive(self, bucket: Bucket) -> BucketArrivals:
        """Waits until a bucket's parameters have arrived here or are lost, and have been forwarded."""
        in_flight = self._in_flight.pop(bucket.index)
        node_layout, wire, received = self._islands[bucket.index], self._wires[bucket.index], in_flight.received
        (near,) = in_flight.inside.wait()
        dated, *passed = in_flight.relay.wait()
        for place, rank in enumerate(node_layout.inside.ranks):
            if place == self._place:
                continue
            owner = self._machines[self._machine][place]
            chunks = wire.chunks(bucket.spans[owner][1])
            received.fresh[owner] = torch.full((chunks,), near.fraction(peer=rank) == 1.0, device="cpu")
            at = 0
            for ranks, arrival in zip(self._others, passed, strict=True):
                owner = ranks[place]
                chunks = wire.chunks(bucket.spans[owner][1])
                # If a rank dies while it forwards its copies, they count as lost; what arrived of them stays.
                whole = dated.fraction(peer=rank) == 1.0 and arrival.fraction(peer=rank) == 1.0
                received.ages[owner] = in_flight.ages[place][at : at + chunks] if whole else None
                at += chunks
        return received


def _arrived(arrival: ExchangeResult, rank: int) -> torch.Tensor:
    chunks, arrived = arrival.links()[rank]
    return torch.ones(chunks, dtype=torch.bool, device="cpu") if arrived == chunks else arrival.mask(rank)

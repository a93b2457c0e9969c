"""Stage 2 where ranks share machines: an owner's parameters reach each other machine once, and are passed on there.

An owner sends its shard, as the policy says, to those that have its place on other machines, and exactly to all ranks
of its own machine. Whoever receives from another machine puts what arrived where it belongs, fetches what is overdue,
and passes its copy of the shard on to the others of its machine, exactly, with the ages of its chunks. So all ranks of
a machine have the same copies of what other machines own, with the same ages.
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
from stormtorch.reliability import Reliability
from stormtorch.runtime.memory.bucket import Bucket
from stormtorch.runtime.session.relays import Relay, Relays


@dataclass(frozen=True)
class Fetch:
    """Chunks of an owner's shard that it sends exactly, as the copy here is too old."""

    owner: int
    where: torch.Tensor
    """Indices of their elements in the shard."""
    message: torch.Tensor
    pending: Pending

    def place(self, bucket: Bucket, per_chunk: int) -> torch.Tensor | None:
        """Waits for the chunks and copies them. Returns their numbers; None if the owner is gone."""
        (arrival,) = self.pending.wait()
        if arrival.arrived < 1.0:
            return None
        bucket.shard(bucket.host_flat, self.owner)[self.where] = self.message.to(bucket.dtype)
        chunks_C: torch.Tensor = torch.unique(self.where // per_chunk)
        return chunks_C


@dataclass
class BucketArrivals:
    """What came of one bucket."""

    inter_machine: list[ExchangeResult] = field(default_factory=list)
    """Arrivals of the exchange between machines."""
    fresh: dict[int, torch.Tensor] = field(default_factory=dict)
    """For owners whose shards came from themselves, whether each chunk is new, (C,)."""
    ages: dict[int, torch.Tensor | None] = field(default_factory=dict)
    """For owners whose shards were passed on here, the age of each chunk, (C,); None if they did not come whole."""
    fetched: int = 0
    """Number of chunks that this rank has fetched."""


@dataclass
class _BucketInFlight:
    """One bucket on its way."""

    inter_machine: Pending
    inside: Pending
    relay: Relay
    received: BucketArrivals
    ages: list[torch.Tensor]
    """For each rank of this machine, ages of the chunks that it passes on, shard by shard."""


class HierarchicalBroadcast:
    """Broadcasts of one session by machines.

    Args:
        islands: Layout over machines of each bucket's group.
        wires: Number format in which each bucket travels between machines.
        relays: Passes on what has come from other machines.
    """

    def __init__(self, node_layout: Sequence[NodeLayout], wires: Sequence[Wire], relays: Relays) -> None:
        self._islands = node_layout
        self._wires = wires
        self._relays = relays
        self._place, self._machines = node_layout[0].inside.rank, node_layout[0].machines
        self._machine = node_layout[0].between.rank
        self.sources = [ranks[self._place] for at, ranks in enumerate(self._machines) if at != self._machine]
        """Owners on other machines whose parameters come to this rank first: those with the same place."""
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
            fetches: Begins to fetch chunks that are too old.
            ages: Ages of this rank's copies before, by owner.
        """
        node_layout, wire, flat = self._islands[bucket.index], self._wires[bucket.index], bucket.host_flat
        mine = self._machines[self._machine]
        destinations = {owner: bucket.shard(flat, owner) for owner in self.sources}
        receive_buffers = destinations
        if wire.dtype != bucket.dtype:
            receive_buffers = {owner: wire.room(destination.numel()) for owner, destination in destinations.items()}
        around = [*receive_buffers.values()]
        around.insert(self._machine, message)
        # Own places are taken by the messages themselves: owners keep the parameters that they have.
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
            # Others may count otherwise, as a rank that calls `exact` alone has the newest copies: they get ours.
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
        """Waits until a bucket's parameters have arrived here or are lost, and have been passed on."""
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
                # If a rank dies while it passes its copies on, these count as lost; what has come of them stays.
                whole = dated.fraction(peer=rank) == 1.0 and arrival.fraction(peer=rank) == 1.0
                received.ages[owner] = in_flight.ages[place][at : at + chunks] if whole else None
                at += chunks
        return received


def _arrived(arrival: ExchangeResult, rank: int) -> torch.Tensor:
    chunks, arrived = arrival.links()[rank]
    return torch.ones(chunks, dtype=torch.bool, device="cpu") if arrived == chunks else arrival.mask(rank)

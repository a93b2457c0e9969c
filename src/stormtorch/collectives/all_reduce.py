"""All-reduce: every rank ends with the reduction of all ranks' tensors."""

import torch

from stormtorch.collectives.base import ops
from stormtorch.collectives.base.group import Group, Pending, Steps, nothing
from stormtorch.collectives.base.ops import Op
from stormtorch.collectives.base.spans import address, shards, size
from stormtorch.exchange.exchange import WIRE_DTYPES, Plan, Receive, ReduceMode, Reduction, Send
from stormtorch.exchange.reliability import EXACT, Reliability

# Up to this size each rank may send its whole tensor to every other. That saves a trip but costs a copy of the tensor,
# which takes too long for larger ones.
_DIRECT_BYTES = 512 << 10
# Bytes of the largest exchange, well below the 4 GiB that a message's length field can express.
_PIECE_BYTES = 1 << 31


def all_reduce(
    group: Group,
    tensor: torch.Tensor,
    op: Op = Op.SUM,
    *,
    reliability: Reliability = EXACT,
    share: Reliability | None = None,
    timeout_s: float | None = None,
) -> Pending:
    """Reduces `tensor` over the group, in place.

    An exact reduction adds in rank order and gives the same bits on every rank. A lossy AVG is the mean of the
    contributions that arrived; a lossy SUM is that mean times the group's size.

    Args:
        group: The ranks that take part.
        tensor: This rank's contribution, replaced by the result. Contiguous, on the CPU.
        op: The reduction.
        reliability: How much may be missing in the first stage, in which each shard's owner collects contributions.
        share: How much may be missing in the second stage, in which owners send their results; None takes
            `reliability`. A rank that misses a result keeps its own contribution (times the group's size for SUM).
            With `EXACT`, all ranks end with the same bits even if the first stage lost some. Small tensors skip the
            second stage, unless only one of the two is exact: every rank sends its contribution to all others.
        timeout_s: Seconds until the call fails; None takes the transport's default.
    """
    share = reliability if share is None else share
    ops.check(tensor, op, reliability)
    ops.check(tensor, op, share)
    address(tensor, "tensor")
    flat = tensor.view(-1)
    if group.size == 1:
        return group.start(nothing())
    if not ops.on_arrival(tensor, op):
        if _direct_pays(group, size(flat)):
            return group.start(_direct_by_torch(group, flat, op, group.reserve(), timeout_s))
        return group.start(_by_torch(group, flat, op, group.reserve(2), timeout_s), 2)
    if reliability.exact == share.exact and _direct_pays(group, size(flat)):
        return group.start(_direct(group, flat, op, group.reserve(), reliability, timeout_s))
    piece = _PIECE_BYTES // flat.element_size()
    pieces = [flat[first : first + piece] for first in range(0, flat.numel(), piece)] or [flat]
    names = [group.reserve() for _ in pieces]
    return group.start(_in_two_stages(group, pieces, op, names, reliability, share, timeout_s), len(pieces))


def _mode(reliability: Reliability) -> ReduceMode:
    return ReduceMode.IN_ORDER if reliability.exact else ReduceMode.ARRIVED


def _direct_pays(group: Group, length: int) -> bool:
    """Whether saving a trip is worth the additional bytes: (n-1) S instead of 2 (n-1)/n S."""
    additional = length * (group.size - 1) * (group.size - 2) // group.size
    return length <= _DIRECT_BYTES and additional <= group.transport.trip_bytes


def _direct(
    group: Group,
    flat: torch.Tensor,
    op: Op,
    name: tuple[int, int],
    reliability: Reliability,
    timeout_s: float | None,
) -> Steps:
    # Send a copy: the result may replace the original before the last peer has received it.
    own = flat.clone()
    source, out, length = own.data_ptr(), flat.data_ptr(), size(flat)
    wire = WIRE_DTYPES[flat.dtype]
    ranks = group.ranks
    yield Plan(
        "all_reduce",
        *name,
        [Send(ranks[peer], source, length) for peer in group.others()],
        [Receive(ranks[peer], 0, length, False, True) for peer in range(group.size) if peer != group.rank],
        Reduction(_mode(reliability), wire, wire, source, out, length, group.rank, op is Op.AVG),
        reliability,
        timeout_s=timeout_s,
        keep=(own, flat),
    )


def _in_two_stages(
    group: Group,
    pieces: list[torch.Tensor],
    op: Op,
    names: list[tuple[int, int]],
    reliability: Reliability,
    share: Reliability,
    timeout_s: float | None,
) -> Steps:
    ranks, me = group.ranks, group.rank
    for flat, name in zip(pieces, names, strict=True):
        element = flat.element_size()
        spans = [
            (flat.data_ptr() + first * element, count * element)
            for first, count in shards(flat.numel(), element, group.size)
        ]
        own, length = spans[me]
        wire = WIRE_DTYPES[flat.dtype]
        others = group.others()
        in_order = sorted(others)
        arrival = yield Plan(
            "all_reduce",
            *name,
            [Send(ranks[peer], *spans[peer]) for peer in others]
            + [Send(ranks[peer], own, length, True) for peer in others],
            [Receive(ranks[peer], 0, length, False, True) for peer in in_order]
            + [Receive(ranks[peer], *spans[peer], True) for peer in others],
            Reduction(_mode(reliability), wire, wire, own, own, length, me, op is Op.AVG),
            reliability,
            share,
            timeout_s,
            (flat,),
        )
        if op is Op.SUM and not share.exact:
            for peer in others:
                _scale_what_is_missing(flat, spans[peer], arrival.mask(ranks[peer], stage=1), group)


def _scale_what_is_missing(flat: torch.Tensor, span: tuple[int, int], mask: torch.Tensor, group: Group) -> None:
    """Replaces chunks of the shared sum that were lost by this rank's own contribution times the group's size."""
    if bool(mask.all()):
        return
    element = flat.element_size()
    first = (span[0] - flat.data_ptr()) // element
    per_chunk = group.transport.chunk_bytes // element
    shard = flat.narrow(0, first, span[1] // element)
    for chunk in (~mask).nonzero().flatten().tolist():
        shard[chunk * per_chunk : (chunk + 1) * per_chunk] *= group.size


def _direct_by_torch(group: Group, flat: torch.Tensor, op: Op, name: tuple[int, int], timeout_s: float | None) -> Steps:
    """Reduces any dtype and operation: ranks send each other whole tensors, and torch reduces them in rank order."""
    ranks, others = group.ranks, group.others()
    placed = [flat if peer == group.rank else torch.empty_like(flat) for peer in range(group.size)]
    arrival = yield Plan(
        "all_reduce",
        *name,
        [Send(ranks[peer], flat.data_ptr(), size(flat)) for peer in others],
        [Receive(ranks[peer], placed[peer].data_ptr(), size(flat)) for peer in others],
        timeout_s=timeout_s,
        keep=(flat, *placed),
    )
    ops.fold(group.complete_only(placed, arrival), op, flat)


def _by_torch(group: Group, flat: torch.Tensor, op: Op, name: tuple[int, int], timeout_s: float | None) -> Steps:
    """Reduces larger tensors of any dtype and operation: each rank reduces one shard by torch, then sends it to all."""
    channel, seq = name
    element, ranks, others = flat.element_size(), group.ranks, group.others()
    cuts = shards(flat.numel(), element, group.size)
    spans = [(flat.data_ptr() + first * element, count * element) for first, count in cuts]
    first, count = cuts[group.rank]
    own = flat.narrow(0, first, count)
    placed = [own if peer == group.rank else torch.empty_like(own) for peer in range(group.size)]
    arrival = yield Plan(
        "all_reduce",
        channel,
        seq,
        [Send(ranks[peer], *spans[peer]) for peer in others],
        [Receive(ranks[peer], placed[peer].data_ptr(), size(own)) for peer in others],
        timeout_s=timeout_s,
        keep=(flat, *placed),
    )
    ops.fold(group.complete_only(placed, arrival), op, own)
    yield Plan(
        "all_reduce",
        channel,
        seq + 1,
        [Send(ranks[peer], *spans[group.rank]) for peer in others],
        [Receive(ranks[peer], *spans[peer]) for peer in others],
        timeout_s=timeout_s,
        keep=(flat,),
    )

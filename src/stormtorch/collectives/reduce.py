"""Reduce: one rank ends with the reduction of all ranks' tensors."""

import torch

from stormtorch.collectives.base import ops
from stormtorch.collectives.base.group import Group, Pending, Steps
from stormtorch.collectives.base.ops import Op
from stormtorch.collectives.base.spans import address, shards, size
from stormtorch.exchange.exchange import WIRE_DTYPES, Plan, Receive, ReduceMode, Reduction, Send
from stormtorch.exchange.reliability import EXACT, Reliability


def reduce(
    group: Group,
    tensor: torch.Tensor,
    root: int,
    op: Op = Op.SUM,
    *,
    reliability: Reliability = EXACT,
    timeout_s: float | None = None,
) -> Pending:
    """Reduces `tensor` over the group into the root's `tensor`. The tensors of other ranks do not change.

    Each rank reduces one shard and sends it to the root, so that the root receives one tensor and not one per rank. An
    exact reduction adds in rank order. A lossy AVG is the mean of the contributions that arrived, and a lossy SUM that
    mean times the group's size; the root receives either exactly.

    Args:
        group: The ranks that take part.
        tensor: This rank's contribution, replaced by the result on the root.
        root: The rank that receives the result.
        op: The reduction.
        reliability: How much of the contributions may be missing.
        timeout_s: Seconds until the call fails; None takes the transport's default.
    """
    group.check_rank(root, "root")
    ops.check(tensor, op, reliability)
    address(tensor, "tensor")
    flat = tensor.view(-1)
    if ops.on_arrival(tensor, op):
        return group.start(_on_arrival(group, flat, root, op, group.reserve(), reliability, timeout_s))
    return group.start(_by_torch(group, flat, root, op, group.reserve(), timeout_s))


def _on_arrival(
    group: Group,
    flat: torch.Tensor,
    root: int,
    op: Op,
    name: tuple[int, int],
    reliability: Reliability,
    timeout_s: float | None,
) -> Steps:
    if group.size == 1:
        return
    ranks, me, element = group.ranks, group.rank, flat.element_size()
    cuts = shards(flat.numel(), element, group.size)
    spans = [(flat.data_ptr() + first * element, count * element) for first, count in cuts]
    own, length = spans[me]
    result = flat.narrow(0, *cuts[me]) if me == root else torch.empty(cuts[me][1], dtype=flat.dtype, device="cpu")
    wire = WIRE_DTYPES[flat.dtype]
    others = group.others()
    yield Plan(
        "reduce",
        *name,
        [Send(ranks[peer], *spans[peer]) for peer in others]
        + ([] if me == root else [Send(ranks[root], result.data_ptr(), length, True)]),
        [Receive(ranks[peer], 0, length, False, True) for peer in sorted(others)]
        + ([Receive(ranks[peer], *spans[peer], True) for peer in others] if me == root else []),
        Reduction(
            ReduceMode.IN_ORDER if reliability.exact else ReduceMode.ARRIVED,
            wire,
            wire,
            own,
            result.data_ptr(),
            length,
            me,
            op is Op.AVG,
        ),
        reliability,
        timeout_s=timeout_s,
        keep=(flat, result),
    )


def _by_torch(
    group: Group, flat: torch.Tensor, root: int, op: Op, name: tuple[int, int], timeout_s: float | None
) -> Steps:
    """Reduces any dtype and operation: the root receives whole tensors, and torch reduces them in rank order."""
    ranks, me = group.ranks, group.rank
    placed = [flat if peer == me else torch.empty_like(flat) for peer in range(group.size)] if me == root else []
    if group.size > 1:
        arrival = yield Plan(
            "reduce",
            *name,
            [] if me == root else [Send(ranks[root], flat.data_ptr(), size(flat))],
            [Receive(ranks[peer], placed[peer].data_ptr(), size(flat)) for peer in group.others()]
            if me == root
            else [],
            timeout_s=timeout_s,
            keep=(flat, *placed),
        )
        placed = group.complete_only(placed, arrival)
    if me == root:
        ops.fold(placed, op, flat)

"""Reduce-scatter: each rank ends with its own shard of the reduction."""

import torch

from stormtorch.collectives.base import ops
from stormtorch.collectives.base.group import Group, Pending, Steps
from stormtorch.collectives.base.ops import Op
from stormtorch.collectives.base.spans import address, size
from stormtorch.exchange.exchange import WIRE_DTYPES, Plan, Receive, ReduceMode, Reduction, Send
from stormtorch.exchange.reliability import EXACT, Reliability


def reduce_scatter(
    group: Group,
    output: torch.Tensor,
    inputs: list[torch.Tensor],
    op: Op = Op.SUM,
    *,
    reliability: Reliability = EXACT,
    timeout_s: float | None = None,
) -> Pending:
    """Reduces `inputs[i]` of all ranks into rank i's `output`.

    An exact reduction adds in rank order. A lossy AVG is the mean of the contributions that arrived, this rank's own
    always included; a lossy SUM is that mean times the group's size. `wait()[0].counts()` has the number of
    contributions to each chunk.

    Args:
        group: The ranks that take part.
        output: This rank's shard of the result. It may be float32 if the inputs are bfloat16 or float16.
        inputs: One contribution per rank. They may be views of one tensor.
        op: The reduction.
        reliability: How much of each message may be missing.
        timeout_s: Seconds until the call fails; None takes the transport's default.
    """
    if len(inputs) != group.size:
        raise ValueError(f"inputs must hold one tensor per rank, {group.size}, got {len(inputs)}")
    own = inputs[group.rank]
    ops.check(own, op, reliability)
    widened = output.dtype == torch.float32 and ops.on_arrival(own, op)
    if output.numel() != own.numel() or (output.dtype != own.dtype and not widened):
        raise ValueError(
            f"output must have {own.numel()} x {own.dtype} as inputs[{group.rank}] has, "
            f"got {output.numel()} x {output.dtype}"
        )
    address(output, "output")
    for index, each in enumerate(inputs):
        address(each, f"inputs[{index}]")
    if ops.on_arrival(own, op):
        return group.start(_on_arrival(group, output, inputs, op, group.reserve(), reliability, timeout_s))
    return group.start(_by_torch(group, output, inputs, op, group.reserve(), timeout_s))


def _on_arrival(
    group: Group,
    output: torch.Tensor,
    inputs: list[torch.Tensor],
    op: Op,
    name: tuple[int, int],
    reliability: Reliability,
    timeout_s: float | None,
) -> Steps:
    own, ranks = inputs[group.rank], group.ranks
    if group.size == 1:
        output.copy_(own)
        return
    wire = WIRE_DTYPES[own.dtype]
    mode = ReduceMode.IN_ORDER if reliability.exact else ReduceMode.ARRIVED
    yield Plan(
        "reduce_scatter",
        *name,
        [Send(ranks[peer], inputs[peer].data_ptr(), size(inputs[peer])) for peer in group.others()],
        [Receive(ranks[peer], 0, size(own), False, True) for peer in range(group.size) if peer != group.rank],
        Reduction(
            mode,
            wire,
            WIRE_DTYPES[output.dtype],
            own.data_ptr(),
            output.data_ptr(),
            size(own),
            group.rank,
            op is Op.AVG,
        ),
        reliability,
        timeout_s=timeout_s,
        keep=(output, *inputs),
    )


def _by_torch(
    group: Group,
    output: torch.Tensor,
    inputs: list[torch.Tensor],
    op: Op,
    name: tuple[int, int],
    timeout_s: float | None,
) -> Steps:
    """Reduces any dtype and operation: each rank receives whole contributions, and torch reduces them in rank order."""
    own, ranks = inputs[group.rank], group.ranks
    placed = [own if peer == group.rank else torch.empty_like(own) for peer in range(group.size)]
    if group.size > 1:
        arrival = yield Plan(
            "reduce_scatter",
            *name,
            [Send(ranks[peer], inputs[peer].data_ptr(), size(inputs[peer])) for peer in group.others()],
            [Receive(ranks[peer], placed[peer].data_ptr(), size(own)) for peer in group.others()],
            timeout_s=timeout_s,
            keep=(*placed, *inputs),
        )
        placed = group.complete_only(placed, arrival)
    ops.fold(placed, op, output)

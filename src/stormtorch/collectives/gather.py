"""Gather: one rank ends with every rank's tensor."""

from collections.abc import Sequence

import torch

from stormtorch.collectives.base.group import Group, Pending, Steps
from stormtorch.collectives.base.spans import address, check_lossy, check_same, size
from stormtorch.exchange.exchange import Plan, Receive, Send
from stormtorch.exchange.reliability import EXACT, Reliability


def gather(
    group: Group,
    tensor: torch.Tensor,
    outputs: Sequence[torch.Tensor] | None,
    root: int,
    *,
    reliability: Reliability = EXACT,
    timeout_s: float | None = None,
) -> Pending:
    """Copies rank i's `tensor` into the root's `outputs[i]`.

    Args:
        group: The ranks that take part.
        tensor: This rank's tensor.
        outputs: On the root, one tensor per rank; None elsewhere. A lost chunk keeps its old value.
        root: The rank that receives all tensors.
        reliability: How much of each message may be missing.
        timeout_s: Seconds until the call fails; None takes the transport's default.
    """
    group.check_rank(root, "root")
    check_lossy(tensor, reliability, "gather")
    address(tensor, "tensor")
    if group.rank == root and (outputs is None or len(outputs) != group.size):
        raise ValueError(f"outputs must hold one tensor per rank, {group.size}, on the root, rank {root}")
    if group.rank == root and outputs is not None:
        check_same(outputs[root], tensor, f"outputs[{root}]")
    for index, each in enumerate(outputs or ()):
        address(each, f"outputs[{index}]")
    return group.start(_steps(group, tensor, outputs or (), root, group.reserve(), reliability, timeout_s))


def _steps(
    group: Group,
    tensor: torch.Tensor,
    outputs: Sequence[torch.Tensor],
    root: int,
    name: tuple[int, int],
    reliability: Reliability,
    timeout_s: float | None,
) -> Steps:
    ranks, sends, receives = group.ranks, [], []
    if group.rank == root:
        outputs[root].view(-1).copy_(tensor.view(-1))
        receives = [Receive(ranks[peer], outputs[peer].data_ptr(), size(outputs[peer])) for peer in group.others()]
    else:
        sends = [Send(ranks[root], tensor.data_ptr(), size(tensor))]
    if group.size > 1:
        yield Plan(
            "gather",
            *name,
            sends,
            receives,
            reliability=reliability,
            timeout_s=timeout_s,
            keep=(tensor, *outputs),
        )

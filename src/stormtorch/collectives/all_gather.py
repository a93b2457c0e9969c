"""All-gather: every rank ends with every rank's tensor."""

import torch

from stormtorch.collectives.base.group import Group, Pending, Steps
from stormtorch.collectives.base.spans import address, check_lossy, check_same, size
from stormtorch.exchange.exchange import Plan, Receive, Send
from stormtorch.exchange.reliability import EXACT, Reliability


def all_gather(
    group: Group,
    outputs: list[torch.Tensor],
    tensor: torch.Tensor,
    *,
    reliability: Reliability = EXACT,
    timeout_s: float | None = None,
) -> Pending:
    """Copies rank i's `tensor` into every rank's `outputs[i]`.

    Args:
        group: The ranks that take part.
        outputs: One tensor per rank, of that rank's size. A lost chunk keeps its old value.
        tensor: This rank's tensor. It may share its memory with `outputs[rank]`.
        reliability: How much of each message may be missing.
        timeout_s: Seconds until the call fails; None takes the transport's default.
    """
    if len(outputs) != group.size:
        raise ValueError(f"outputs must hold one tensor per rank, {group.size}, got {len(outputs)}")
    check_same(outputs[group.rank], tensor, f"outputs[{group.rank}]")
    check_lossy(tensor, reliability, "all_gather")
    address(tensor, "tensor")
    for index, each in enumerate(outputs):
        address(each, f"outputs[{index}]")
    return group.start(_steps(group, outputs, tensor, group.reserve(), reliability, timeout_s))


def _steps(
    group: Group,
    outputs: list[torch.Tensor],
    tensor: torch.Tensor,
    name: tuple[int, int],
    reliability: Reliability,
    timeout_s: float | None,
) -> Steps:
    own = outputs[group.rank]
    if own.data_ptr() != tensor.data_ptr():
        own.view(-1).copy_(tensor.view(-1))
    if group.size == 1:
        return
    ranks, others = group.ranks, group.others()
    yield Plan(
        "all_gather",
        *name,
        [Send(ranks[peer], tensor.data_ptr(), size(tensor)) for peer in others],
        [Receive(ranks[peer], outputs[peer].data_ptr(), size(outputs[peer])) for peer in others],
        reliability=reliability,
        timeout_s=timeout_s,
        keep=(tensor, *outputs),
    )

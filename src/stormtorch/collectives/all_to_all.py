"""All-to-all: every rank sends a different tensor to each rank."""

from collections.abc import Sequence

import torch

from stormtorch.collectives.base.group import Group, Pending, Steps
from stormtorch.collectives.base.spans import address, check_lossy, check_same, size
from stormtorch.exchange.exchange import Plan, Receive, Send
from stormtorch.exchange.reliability import EXACT, Reliability


def all_to_all(
    group: Group,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    *,
    reliability: Reliability = EXACT,
    timeout_s: float | None = None,
) -> Pending:
    """Copies rank i's `inputs[j]` into rank j's `outputs[i]`. Sizes may differ from pair to pair, and may be zero.

    Args:
        group: The ranks that take part.
        outputs: One tensor per rank. A lost chunk keeps its old value.
        inputs: One tensor per rank. They must not overlap the outputs.
        reliability: How much of each message may be missing.
        timeout_s: Seconds until the call fails; None takes the transport's default.
    """
    for name, tensors in (("outputs", outputs), ("inputs", inputs)):
        if len(tensors) != group.size:
            raise ValueError(f"{name} must hold one tensor per rank, {group.size}, got {len(tensors)}")
        for index, each in enumerate(tensors):
            address(each, f"{name}[{index}]")
            check_lossy(each, reliability, "all_to_all")
    check_same(outputs[group.rank], inputs[group.rank], f"outputs[{group.rank}]")
    return group.start(_steps(group, outputs, inputs, group.reserve(), reliability, timeout_s))


def _steps(
    group: Group,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    name: tuple[int, int],
    reliability: Reliability,
    timeout_s: float | None,
) -> Steps:
    outputs[group.rank].view(-1).copy_(inputs[group.rank].view(-1))
    if group.size == 1:
        return
    ranks, others = group.ranks, group.others()
    yield Plan(
        "all_to_all",
        *name,
        [Send(ranks[peer], inputs[peer].data_ptr(), size(inputs[peer])) for peer in others],
        [Receive(ranks[peer], outputs[peer].data_ptr(), size(outputs[peer])) for peer in others],
        reliability=reliability,
        timeout_s=timeout_s,
        keep=(*outputs, *inputs),
    )

"""Scatter: one rank sends a different tensor to each rank."""

from collections.abc import Sequence

import torch

from stormtorch.collectives.base.group import Group, Pending, Steps
from stormtorch.collectives.base.spans import address, check_lossy, check_same, size
from stormtorch.exchange.exchange import Plan, Receive, Send
from stormtorch.exchange.reliability import EXACT, Reliability


def scatter(
    group: Group,
    output: torch.Tensor,
    inputs: Sequence[torch.Tensor] | None,
    root: int,
    *,
    reliability: Reliability = EXACT,
    timeout_s: float | None = None,
) -> Pending:
    """Copies the root's `inputs[i]` into rank i's `output`.

    Args:
        group: The ranks that take part.
        output: The tensor that this rank receives. A lost chunk keeps its old value.
        inputs: On the root, one tensor per rank; None elsewhere.
        root: The rank that sends.
        reliability: How much of each message may be missing.
        timeout_s: Seconds until the call fails; None takes the transport's default.
    """
    group.check_rank(root, "root")
    check_lossy(output, reliability, "scatter")
    address(output, "output")
    if group.rank == root and (inputs is None or len(inputs) != group.size):
        raise ValueError(f"inputs must hold one tensor per rank, {group.size}, on the root, rank {root}")
    if group.rank == root and inputs is not None:
        check_same(inputs[root], output, f"inputs[{root}]")
    for index, each in enumerate(inputs or ()):
        address(each, f"inputs[{index}]")
    return group.start(_steps(group, output, inputs or (), root, group.reserve(), reliability, timeout_s))


def _steps(
    group: Group,
    output: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    root: int,
    name: tuple[int, int],
    reliability: Reliability,
    timeout_s: float | None,
) -> Steps:
    ranks, sends, receives = group.ranks, [], []
    if group.rank == root:
        output.view(-1).copy_(inputs[root].view(-1))
        sends = [Send(ranks[peer], inputs[peer].data_ptr(), size(inputs[peer])) for peer in group.others()]
    else:
        receives = [Receive(ranks[root], output.data_ptr(), size(output))]
    if group.size > 1:
        yield Plan(
            "scatter",
            *name,
            sends,
            receives,
            reliability=reliability,
            timeout_s=timeout_s,
            keep=(output, *inputs),
        )

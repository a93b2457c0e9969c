"""Broadcast: every rank ends with the root's tensor."""

from dataclasses import replace

import torch

from stormtorch.collectives.base.group import Group, Pending, Steps
from stormtorch.collectives.base.spans import address, check_lossy, shards, size
from stormtorch.exchange.exchange import Plan, Receive, ReduceMode, Reduction, Send, WireDtype
from stormtorch.exchange.reliability import EXACT, Reliability


def broadcast(
    group: Group,
    tensor: torch.Tensor,
    root: int,
    *,
    reliability: Reliability = EXACT,
    timeout_s: float | None = None,
) -> Pending:
    """Copies the root's `tensor` into every rank's `tensor`.

    The root sends a large tensor only once, for a group of any size: every other rank forwards one shard of it to the
    rest, chunk by chunk as it arrives.

    Args:
        group: The ranks that take part.
        tensor: Read on the root, written on all other ranks. A lost chunk keeps its old value.
        root: The rank that sends.
        reliability: How much of each message may be missing. With loss p, a forwarded chunk is lost with probability
            1 - (1 - p)^2.
        timeout_s: Seconds until the call fails; None takes the transport's default.
    """
    group.check_rank(root, "root")
    check_lossy(tensor, reliability, "broadcast")
    address(tensor, "tensor")
    # The root sends a small tensor to every rank itself, in one trip.
    additional = size(tensor) * (group.size - 2)
    steps = _direct if additional <= group.transport.trip_bytes else _forwarded
    return group.start(steps(group, tensor.view(-1), root, group.reserve(), reliability, timeout_s))


def _direct(
    group: Group,
    flat: torch.Tensor,
    root: int,
    name: tuple[int, int],
    reliability: Reliability,
    timeout_s: float | None,
) -> Steps:
    if group.size == 1:
        return
    ranks, data, length = group.ranks, flat.data_ptr(), size(flat)
    yield Plan(
        "broadcast",
        *name,
        [Send(ranks[peer], data, length) for peer in group.others()] if group.rank == root else [],
        [] if group.rank == root else [Receive(ranks[root], data, length)],
        reliability=reliability,
        timeout_s=timeout_s,
        keep=(flat,),
    )


def _forwarded(
    group: Group,
    flat: torch.Tensor,
    root: int,
    name: tuple[int, int],
    reliability: Reliability,
    timeout_s: float | None,
) -> Steps:
    ranks, me, element = group.ranks, group.rank, flat.element_size()
    receivers = [peer for peer in group.others() if peer != root]
    owners = [peer for peer in range(group.size) if peer != root]
    cuts = shards(flat.numel(), element, len(owners))
    spans = {
        owner: (flat.data_ptr() + first * element, count * element)
        for owner, (first, count) in zip(owners, cuts, strict=True)
    }
    if me == root:
        sends = [Send(ranks[peer], *spans[peer]) for peer in group.others()]
        receives: list[Receive] = []
        reduction = None
    else:
        own, length = spans[me]
        sends = [Send(ranks[peer], own, length, True) for peer in receivers]
        receives = [Receive(ranks[root], 0, length, False, True)]
        receives += [Receive(ranks[peer], *spans[peer], True) for peer in receivers]
        reduction = Reduction(ReduceMode.COPY, WireDtype.BYTES, WireDtype.BYTES, 0, own, length, 0, False)
    # A rank cannot forward what it has lost, so it may lose only half of its receivers' budget.
    first = reliability if reliability.budget == 1.0 else replace(reliability, budget=reliability.budget / 2)
    yield Plan("broadcast", *name, sends, receives, reduction, first, reliability, timeout_s, (flat,))

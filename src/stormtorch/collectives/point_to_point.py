"""Send and receive: one tensor from one rank to another."""

import torch

from stormtorch.collectives.base.group import Group, Pending, Steps
from stormtorch.collectives.base.spans import address, check_lossy, size
from stormtorch.exchange.exchange import Plan, Receive, Send
from stormtorch.exchange.reliability import EXACT, Reliability


def send(
    group: Group,
    tensor: torch.Tensor,
    target: int,
    *,
    tag: int = 0,
    reliability: Reliability = EXACT,
    timeout_s: float | None = None,
) -> Pending:
    """Sends `tensor` to rank `target`, which must receive it under the same tag. Messages of one tag keep their order.

    Args:
        group: The group of both ranks.
        tensor: The tensor to send. Do not change it before `wait` has returned.
        target: The receiving rank.
        tag: Tells apart messages between the same two ranks.
        reliability: How much of the message may be missing; must equal the receiver's.
        timeout_s: Seconds until the call fails; None takes the transport's default.
    """
    group.check_rank(target, "target")
    if target == group.rank:
        raise ValueError(f"target must be another rank than this one, {group.rank}")
    check_lossy(tensor, reliability, "send")
    message = Send(group.ranks[target], address(tensor, "tensor"), size(tensor))
    name = group.reserve_point_to_point(group.rank, target, tag)
    return group.start(_steps("send", name, [message], [], tensor, reliability, timeout_s))


def receive(
    group: Group,
    tensor: torch.Tensor,
    source: int,
    *,
    tag: int = 0,
    reliability: Reliability = EXACT,
    timeout_s: float | None = None,
) -> Pending:
    """Receives into `tensor` the next message that rank `source` sends under the same tag.

    Args:
        group: The group of both ranks.
        tensor: A tensor of the sender's size. A lost chunk keeps its old value.
        source: The sending rank.
        tag: Tells apart messages between the same two ranks.
        reliability: How much of the message may be missing; must equal the sender's.
        timeout_s: Seconds until the call fails; None takes the transport's default.
    """
    group.check_rank(source, "source")
    if source == group.rank:
        raise ValueError(f"source must be another rank than this one, {group.rank}")
    check_lossy(tensor, reliability, "receive")
    message = Receive(group.ranks[source], address(tensor, "tensor"), size(tensor))
    name = group.reserve_point_to_point(source, group.rank, tag)
    return group.start(_steps("receive", name, [], [message], tensor, reliability, timeout_s))


def _steps(
    what: str,
    name: tuple[int, int],
    sends: list[Send],
    receives: list[Receive],
    tensor: torch.Tensor,
    reliability: Reliability,
    timeout_s: float | None,
) -> Steps:
    yield Plan(what, *name, sends, receives, reliability=reliability, timeout_s=timeout_s, keep=(tensor,))

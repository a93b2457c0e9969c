"""Collectives of Python objects: gather and exchange, decoded as data and never as code."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import torch

from stormtorch import collectives
from stormtorch.collectives.base.group import Group, Pending
from stormtorch.errors import Interrupted, StormError
from stormtorch.exchange.exchange import ExchangeResult

# Sizes come from peers: no shard's state is larger than this.
_MOST_BYTES = 1 << 40


def pack(value: object) -> torch.Tensor:
    """Encodes an object of numbers, strings, lists, dictionaries and tensors."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def unpack(message: torch.Tensor) -> Any:
    """Decodes an object that `pack` encoded."""
    return torch.load(io.BytesIO(message.numpy().tobytes()), weights_only=True)


def gather(own: object, group: Group) -> list[Any]:
    """Gathers an object of every rank.

    Raises:
        Interrupted: A rank was lost, and another view begins without it.
    """
    return [unpack(each) for each in exchange([pack(own)] * group.size, group)]


def exchange(messages: Sequence[torch.Tensor], group: Group) -> list[torch.Tensor]:
    """Sends a message of bytes to every rank, and returns those received, one per rank.

    Args:
        messages: One message per rank, of any size.
        group: Ranks that take part.

    Raises:
        Interrupted: A rank was lost, and another view begins without it.
    """
    given = [torch.tensor([each.numel()], dtype=torch.int64, device="cpu") for each in messages]
    sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in messages]
    _all(group, sizes, given)
    rooms = [room(int(size), peer, group) for peer, size in zip(group.ranks, sizes, strict=True)]
    _all(group, rooms, messages)
    return rooms


def room(size: int, peer: int, group: Group) -> torch.Tensor:
    """Allocates a buffer for a message from a rank, which has announced its size.

    Raises:
        StormError: The size is out of range.
    """
    if not 0 <= size <= _MOST_BYTES:
        raise StormError(
            f"rank {group.transport.rank}: rank {peer} announces a message of {size} bytes, which is out of range"
        )
    return torch.empty(size, dtype=torch.uint8, device="cpu")


def _all(group: Group, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
    complete(collectives.all_to_all(group, outputs, inputs), group)


def complete(pending: Pending, group: Group) -> list[ExchangeResult]:
    """Waits for a collective, and returns the results of its exchanges if nothing is missing.

    Raises:
        Interrupted: A rank was lost, and another view begins without it.
    """
    arrivals = pending.wait()
    if any(arrival.arrived < 1.0 for arrival in arrivals):
        raise Interrupted(f"rank {group.transport.rank}: a rank was lost during {group.name}")
    return arrivals

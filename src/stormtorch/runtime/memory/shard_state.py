"""State of one optimizer shard: float32 master values, and the optimizer state of each piece.

A shard's owner and its standby each have one. When ranks join or leave, shards are repartitioned, and ranges of a shard
state are sent as records: the values and the state of some elements of one parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from stormtorch.runtime.memory.bucket import Bucket
from stormtorch.runtime.memory.layout import Layout, Piece

State = dict[str, Any]
"""The optimizer's state of one piece, by name."""


class ShardRecord(NamedTuple):
    """A range of one parameter's elements: their float32 values and their optimizer state."""

    parameter: int
    offset: int
    elements: int
    values: torch.Tensor
    state: State

    def packed(self) -> tuple[int, int, int, torch.Tensor, State]:
        """Returns the record in main memory, ready to send."""
        # Copied, because torch would serialise the whole storage of a view.
        state = {
            name: value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
            for name, value in self.state.items()
        }
        return self.parameter, self.offset, self.elements, self.values.detach().to("cpu", copy=True), state


@dataclass
class ShardState:
    """One shard of all buckets."""

    shard: int
    """Number of the shard, which is the position of its owner among the members."""
    layouts: Sequence[Layout]
    masters: list[torch.Tensor]
    """Float32 values of the shard, by bucket."""
    state_of: Callable[[int, Piece], State]
    """Returns the optimizer's state of a piece, given its bucket."""

    def partition(self, bucket: int, first: int, count: int, *, whole: bool) -> list[ShardRecord]:
        """Returns records of the part of a bucket's range that lies in this shard.

        Args:
            bucket: Number of the bucket.
            first: First element of the range, counted in the bucket.
            count: Number of elements.
            whole: Whether pieces are whole parameters, so that the range ends at parameter boundaries.
        """
        begin, _ = self.layouts[bucket].spans[self.shard]
        records = []
        for piece in self.layouts[bucket].pieces(self.shard):
            low, high = max(piece.first, first), min(piece.first + piece.count, first + count)
            if low >= high:
                continue
            values = self.masters[bucket][low - begin : high - begin]
            state = self.state_of(bucket, piece)
            if not whole:
                state = _slice_state(state, piece.count, low - piece.first, high - low)
            records.append(ShardRecord(piece.parameter, piece.offset + low - piece.first, high - low, values, state))
        return records

    def clear_pruned(self, buckets: Sequence[Bucket]) -> None:
        """Sets the values and the state of pruned elements to zero."""
        for bucket, layout, masters in zip(buckets, self.layouts, self.masters, strict=True):
            if bucket.kept is None:
                continue
            masters.masked_fill_(~bucket.kept.narrow(0, *layout.spans[self.shard]), 0.0)
            for piece in layout.pieces(self.shard):
                clear_pruned(self.state_of(bucket.index, piece), bucket.kept.narrow(0, piece.first, piece.count))


def clear_pruned(state: State, kept_E: torch.Tensor) -> None:
    """Sets the state of a piece's or parameter's pruned elements to zero, in place."""
    for value in state.values():
        # A zero-dimensional value, such as the step count, belongs to no element.
        if isinstance(value, torch.Tensor) and value.dim() and value.numel() == kept_E.numel():
            value.masked_fill_(~kept_E.view(value.shape), 0.0)


def _slice_state(state: State, count: int, offset: int, length: int) -> State:
    """Returns the part of a piece's state that belongs to a range of its elements."""
    return {
        name: value[offset : offset + length] if _by_element(name, value, count) else value
        for name, value in state.items()
    }


def _by_element(name: str, value: Any, count: int) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == (count,) and name != "step"


def assemble(
    piece: Piece,
    records: Sequence[ShardRecord],
    values: torch.Tensor,
    *,
    whole: bool,
    device: torch.device,
    counters: torch.device,
) -> State:
    """Assembles a piece from records that overlap it: writes its values and returns its state.

    If a part of the piece has lost its state, the result is empty: zeros next to a large step count would make Adam's
    next updates several times too large.

    Args:
        piece: The piece.
        records: Records, which may include other parameters.
        values: Memory for the float32 values of the piece.
        whole: Whether pieces are whole parameters, so that one record covers the piece.
        device: Device of the state.
        counters: Device of zero-dimensional values of the state, such as the step count.
    """
    state: State = {}
    complete = True
    for record in records:
        if record.parameter != piece.parameter:
            continue
        low = max(piece.offset, record.offset)
        high = min(piece.offset + piece.count, record.offset + record.elements)
        if low >= high:
            continue
        here, there = slice(low - piece.offset, high - piece.offset), slice(low - record.offset, high - record.offset)
        values[here].copy_(record.values.reshape(-1)[there])
        complete = complete and bool(record.state)
        for name, value in record.state.items():
            if whole or not _by_element(name, value, record.elements):
                kept = state.get(name)
                if kept is None or (name == "step" and float(value) > float(kept)):
                    state[name] = _copied(value, device, counters)
            else:
                if name not in state:
                    state[name] = torch.zeros(piece.count, dtype=value.dtype, device=device)
                state[name][here].copy_(value[there])
    return state if complete else {}


def _copied(value: Any, device: torch.device, counters: torch.device) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(counters if value.dim() == 0 else device, copy=True)


def build(
    shard: int, layouts: Sequence[Layout], records: Sequence[ShardRecord], buckets: Sequence[Bucket], *, whole: bool
) -> tuple[list[torch.Tensor], dict[tuple[int, Piece], State]]:
    """Builds a shard's float32 values, by bucket, and the state of its pieces, from records."""
    by_parameter: dict[int, list[ShardRecord]] = {}
    on_device = False
    for record in records:
        by_parameter.setdefault(record.parameter, []).append(record)
        on_device = on_device or any(
            isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_cuda for value in record.state.values()
        )
    masters, states = [], {}
    for bucket, layout in zip(buckets, layouts, strict=True):
        begin, count = layout.spans[shard]
        values = torch.zeros(count, dtype=torch.float32, device=bucket.device)
        for piece in layout.pieces(shard):
            states[bucket.index, piece] = assemble(
                piece,
                by_parameter.get(piece.parameter, ()),
                values.narrow(0, piece.first - begin, piece.count),
                whole=whole,
                device=bucket.device,
                counters=bucket.device if on_device else torch.device("cpu"),
            )
        masters.append(values)
    return masters, states

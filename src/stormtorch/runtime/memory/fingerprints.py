"""Fingerprints of memory: a few bytes that tell whether parameters or optimizer state are still what they were.

The version counter of a tensor does not see changes through `.data`, so values are compared, not counters.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch

import stormtorch._engine as _engine
from stormtorch.runtime.memory.bucket import Bucket
from stormtorch.runtime.memory.shard_state import ShardState

_ROW = 256
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BITS = 24
"""Bits of a fingerprint that travels: a float32 holds them exactly."""

Fingerprint = int | torch.Tensor
"""Fingerprint of one tensor. On a GPU it stays there, so that taking it does not wait for the GPU."""


def of(values: torch.Tensor) -> Fingerprint:
    """Takes the fingerprint of a tensor's values."""
    flat = values.detach().reshape(-1)
    if flat.device.type == "cpu":
        return _engine.crc32c_at(flat.data_ptr(), flat.numel() * flat.element_size(), 0)
    return sums(flat)


def sums(flat: torch.Tensor) -> torch.Tensor:
    """Takes the fingerprint of values where they lie: sums over rows and columns of their bits, and the last bits."""
    bits = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    bits = bits.contiguous().view(_INTEGERS[bits.element_size()])
    whole = bits.numel() // _ROW * _ROW
    rows = bits[:whole].view(-1, _ROW)
    # Rows are weighted, so that values that change places are seen, too.
    weights = 2 * torch.arange(rows.shape[0], device=flat.device) + 1
    return torch.cat([rows.sum(0), (rows.sum(1) * weights).sum().view(1), bits[whole:].long()])


def same(one: Sequence[Fingerprint], other: Sequence[Fingerprint]) -> bool:
    """Whether two lists of fingerprints of equally large tensors are equal."""
    return all(
        torch.equal(left, right)
        if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)
        else left == right
        for left, right in zip(one, other, strict=True)
    )


def number(prints: Sequence[Fingerprint]) -> int:
    """Folds fingerprints into one number that may travel."""
    folded = 0
    for each in prints:
        raw = bytes(each.cpu().numpy()) if isinstance(each, torch.Tensor) else each.to_bytes(8, "little")
        folded = zlib.crc32(raw, folded)
    return folded & ((1 << _BITS) - 1)


def of_shard_state(shard_state: ShardState) -> tuple[int, int]:
    """Returns fingerprints of a shard's values and of the optimizer's state of it, as numbers that may travel."""
    return number([of(each) for each in shard_state.masters]), _of_state(shard_state)


def _of_state(shard_state: ShardState) -> int:
    prints: list[Fingerprint] = []
    for bucket, layout in enumerate(shard_state.layouts):
        for piece in layout.pieces(shard_state.shard):
            _add(prints, shard_state.state_of(bucket, piece))
    return number(prints)


def _add(prints: list[Fingerprint], value: Any) -> None:
    if isinstance(value, torch.Tensor):
        prints.append(of(value))
    elif isinstance(value, dict):
        for name in sorted(value, key=str):
            _add(prints, str(name))
            _add(prints, value[name])
    elif isinstance(value, list | tuple):
        for each in value:
            _add(prints, each)
    elif isinstance(value, bool | int | float | str | None):
        prints.append(zlib.crc32(repr(value).encode()))


class ChangeDetector:
    """What a shard was when its optimizer had stepped, so that later changes by the program are seen.

    State is not read: it counts as changed if there are other objects, or other versions of the same tensors.

    Args:
        buckets: Buckets of this rank, whose shards are its own.
        holding: The shard.
    """

    def __init__(self, buckets: Sequence[Bucket], shard_state: ShardState) -> None:
        self.values = [of(each) for each in shard_state.masters]
        """Fingerprints of the float32 values, by bucket."""
        self._shown = _shown(buckets)
        # It keeps the objects, so that no other one can take the place of one unnoticed.
        self._contents = _contents(shard_state)

    def values_changed(self, buckets: Sequence[Bucket], shard_state: ShardState) -> bool:
        """Whether parameters have changed since, those of the model or those of the optimizer."""
        now = [of(each) for each in shard_state.masters]
        return not same(now, self.values) or not same(_shown(buckets), self._shown)

    def state_changed(self, shard_state: ShardState) -> bool:
        """Whether the optimizer's state has changed since."""
        now = _contents(shard_state)
        return len(now) != len(self._contents) or any(
            name != name_before or value is not before or version != version_before
            for (name, value, version), (name_before, before, version_before) in zip(now, self._contents, strict=True)
        )


def _shown(buckets: Sequence[Bucket]) -> list[Fingerprint]:
    """Takes the fingerprints of what the model computes with, where the optimizer has values of more bits."""
    return [of(each.own) for each in buckets if each.masters is not each.own]


def _contents(shard_state: ShardState) -> list[tuple[str, Any, int]]:
    return [
        (name, value, value._version if isinstance(value, torch.Tensor) else 0)
        for bucket, layout in enumerate(shard_state.layouts)
        for piece in layout.pieces(shard_state.shard)
        for name, value in shard_state.state_of(bucket, piece).items()
    ]

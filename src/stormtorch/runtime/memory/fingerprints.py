"""Fingerprints (checksums) of parameters and optimizer state: a few bytes that show whether values have changed.

A tensor's version counter misses changes through `.data`, so values are compared instead.
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
"""Bits of a fingerprint that is sent: a float32 holds them exactly."""

Fingerprint = int | torch.Tensor
"""Fingerprint of one tensor. A GPU tensor's stays on the GPU, so that taking it does not wait."""


def of(values: torch.Tensor) -> Fingerprint:
    """Takes the fingerprint of a tensor's values."""
    flat = values.detach().reshape(-1)
    if flat.device.type == "cpu":
        return _engine.crc32c_at(flat.data_ptr(), flat.numel() * flat.element_size(), 0)
    return sums(flat)


def sums(flat: torch.Tensor) -> torch.Tensor:
    """Takes the fingerprint of values on their device: sums over rows and columns of their bits, and the last bits."""
    bits = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    bits = bits.contiguous().view(_INTEGERS[bits.element_size()])
    whole = bits.numel() // _ROW * _ROW
    rows = bits[:whole].view(-1, _ROW)
    # Rows are weighted, so that swapped values change the fingerprint too.
    weights = 2 * torch.arange(rows.shape[0], device=flat.device) + 1
    return torch.cat([rows.sum(0), (rows.sum(1) * weights).sum().view(1), bits[whole:].long()])


def same(one: Sequence[Fingerprint], other: Sequence[Fingerprint]) -> bool:
    """Whether two lists of fingerprints, of tensors of equal sizes, are equal."""
    return all(
        torch.equal(left, right)
        if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)
        else left == right
        for left, right in zip(one, other, strict=True)
    )


def number(prints: Sequence[Fingerprint]) -> int:
    """Folds fingerprints into one number that can be sent."""
    folded = 0
    for each in prints:
        raw = bytes(each.cpu().numpy()) if isinstance(each, torch.Tensor) else each.to_bytes(8, "little")
        folded = zlib.crc32(raw, folded)
    return folded & ((1 << _BITS) - 1)


def of_shard_state(shard_state: ShardState) -> tuple[int, int]:
    """Returns fingerprints of a shard's values and of its optimizer state, as numbers that can be sent."""
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
    """Detects changes of a shard by the program since the optimizer's step.

    Values are compared by fingerprint. State is not read: it counts as changed if objects or tensor versions differ.

    Args:
        buckets: Buckets of this rank, whose shards are its own.
        shard_state: The shard.
    """

    def __init__(self, buckets: Sequence[Bucket], shard_state: ShardState) -> None:
        self.values = [of(each) for each in shard_state.masters]
        """Fingerprints of the float32 values, by bucket."""
        self._shown = _shown(buckets)
        # It keeps the objects alive, so that a new object cannot reuse the identity of an old one.
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
    """Takes the fingerprints of the model's values, for buckets whose optimizer has float32 masters."""
    return [of(each.own) for each in buckets if each.masters is not each.own]


def _contents(shard_state: ShardState) -> list[tuple[str, Any, int]]:
    return [
        (name, value, value._version if isinstance(value, torch.Tensor) else 0)
        for bucket, layout in enumerate(shard_state.layouts)
        for piece in layout.pieces(shard_state.shard)
        for name, value in shard_state.state_of(bucket, piece).items()
    ]

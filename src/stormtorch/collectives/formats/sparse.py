"""Sparse gradient compression (top-k by block): only some elements of a block travel, each as index and narrow value.

Values have 2 bits, a sign and one of the block's two magnitudes, or 16 bits (bfloat16). A block of 4,096 elements of
which 64 travel in 2 bits has 116 bytes instead of 16,384. Blocks do not span chunks, so every chunk that arrives can be
decoded alone. B blocks, K chosen elements of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from stormtorch.checks import check

_INDEX_BITS = 12
_SHIFTS = torch.arange(8, dtype=torch.uint8)


@dataclass(frozen=True, kw_only=True)
class Sparse:
    """Which elements travel, and how."""

    keep: int = 64
    """Elements of each block that travel; a multiple of 8."""
    of: int = 4096
    """Elements of a block."""
    bits: Literal[2, 16] = 2
    """Bits of a value: 2, a sign and one of two magnitudes, or 16, bfloat16."""

    def __post_init__(self) -> None:
        check(1 <= self.of <= 1 << _INDEX_BITS, "of", f"lie in [1, {1 << _INDEX_BITS}]", self.of)
        check(
            self.keep % 8 == 0 and 8 <= self.keep <= self.of, "keep", f"be a multiple of 8 up to {self.of}", self.keep
        )
        check(self.bits in (2, 16), "bits", "be 2 or 16", self.bits)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block: magnitudes, indices and values."""
        return (4 if self.bits == 2 else 0) + self.keep * (_INDEX_BITS + self.bits) // 8

    def blocks(self, chunk_bytes: int) -> int:
        """Returns the number of blocks in a chunk."""
        found = chunk_bytes // self.block_bytes
        check(found >= 1, "keep", f"be less: a block would not fit in {chunk_bytes} bytes", self.keep)
        return found

    # --- values -------------------------------------------------------------------------------------------------------

    def choose(self, scores: torch.Tensor) -> torch.Tensor:
        """Returns the indices (..., B, K), ascending, of the highest scores (..., B, of)."""
        return scores.topk(self.keep, dim=-1, sorted=False).indices.sort(dim=-1).values

    def quantise(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns indices, codes and levels of blocks (..., B, of), of which those with the largest magnitudes travel.

        With 16 bits, NaN elements do not travel, and codes are the values themselves.
        """
        if self.bits == 16:
            places = self.choose((~blocks.isnan()).to(torch.float32))
            return places, blocks.gather(-1, places).to(torch.bfloat16), blocks.new_empty(0)
        places = self.choose(blocks.abs())
        values = blocks.gather(-1, places)
        sizes = values.abs()
        large = sizes > sizes.mean(-1, keepdim=True)
        count = large.sum(-1, keepdim=True)
        high = sizes.mul(large).sum(-1, keepdim=True) / count.clamp(min=1)
        low = sizes.mul(~large).sum(-1, keepdim=True) / (self.keep - count).clamp(min=1)
        levels = torch.cat([low, high], -1).to(torch.bfloat16)
        return places, large.to(torch.uint8) + 2 * (values < 0.0).to(torch.uint8), levels

    def restore(self, places: torch.Tensor, codes: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
        """Returns blocks (..., B, of) from what `quantise` returned: 0 where nothing travelled; NaN with 16 bits."""
        if self.bits == 16:
            values, empty = codes.float(), torch.nan
        else:
            values = levels.float().gather(-1, (codes & 1).long())
            values, empty = torch.where(codes >= 2, -values, values), 0.0
        blocks = torch.full((*places.shape[:-1], self.of), empty, device=places.device)
        return blocks.scatter_(-1, places, values)

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        """Returns values (..., E), with E a multiple of `of`, as receivers see them."""
        blocks = values.reshape(*values.shape[:-1], -1, self.of)
        return self.restore(*self.quantise(blocks)).view_as(values)


class SparseWire:
    """Converts float tensors to messages of a sparse code and back; see `Wire`.

    Args:
        code: The code.
        chunk_bytes: The transport's `chunk_bytes`.
    """

    dtype = torch.uint8
    """A message is bytes, for values of any type."""

    def __init__(self, code: Sparse, chunk_bytes: int) -> None:
        self.code = code
        self._chunk_bytes = chunk_bytes
        self._blocks = code.blocks(chunk_bytes)
        self.per_chunk = self._blocks * code.of
        """Elements of a full chunk: they arrive or are lost together."""

    def chunks(self, elements: int) -> int:
        """Returns the number of chunks of a message; even an empty message has one."""
        return max(-(-elements // self.per_chunk), 1)

    def room(self, elements: int) -> torch.Tensor:
        """Allocates a buffer for a message, as floats, because only floats may be lossy."""
        full, rest = divmod(elements, self.per_chunk)
        size = full * self._chunk_bytes + -(-rest // self.code.of) * self.code.block_bytes
        return torch.zeros(-(-size // 4), dtype=torch.float32, device="cpu")

    def encode(self, tensor: torch.Tensor, _seed: int = 0) -> torch.Tensor:
        """Converts a tensor to a message."""
        code, message = self.code, self.room(tensor.numel())
        if not tensor.numel():
            return message
        places, codes, levels = code.quantise(self._split(tensor.float()))
        parts = [_packed(places.short(), _INDEX_BITS)]
        if code.bits == 2:
            parts = [levels.view(torch.uint8), *parts, _packed(codes.short(), 2)]
        else:
            parts.append(codes.view(torch.uint8))
        packed = torch.cat(parts, -1)
        for (first, last), room in zip(self._runs(len(packed)), self._rooms(message), strict=False):
            room[: (last - first) * code.block_bytes] = packed[first:last].flatten()
        return message

    def decode(self, message: torch.Tensor, elements: int) -> torch.Tensor:
        """Decodes a message. Any bytes decode to some values."""
        code = self.code
        count = -(-elements // code.of)
        if not elements:
            return torch.empty(0)
        packed = torch.cat(
            [
                room[: (last - first) * code.block_bytes]
                for (first, last), room in zip(self._runs(count), self._rooms(message), strict=False)
            ]
        ).view(count, code.block_bytes)
        first = 4 if code.bits == 2 else 0
        last = first + code.keep * _INDEX_BITS // 8
        places = _unpacked(packed[:, first:last], _INDEX_BITS, code.keep).long().clamp_(max=code.of - 1)
        if code.bits == 2:
            codes = _unpacked(packed[:, last:], 2, code.keep)
            levels = packed[:, :4].contiguous().view(torch.bfloat16)
        else:
            codes, levels = packed[:, last:].contiguous().view(torch.bfloat16), torch.empty(0)
        return code.restore(places, codes, levels).view(-1)[:elements]

    def rounded(self, tensor: torch.Tensor, _seed: int = 0) -> torch.Tensor:
        """Returns a tensor as receivers see it."""
        return self.code.rounded(self._split(tensor.float())).view(-1)[: tensor.numel()]

    def place(self, message: torch.Tensor, target: torch.Tensor, arrived_C: torch.Tensor) -> None:
        """Copies the chunks of a message that arrived into `target`; lost ones keep their old values. C chunks."""
        arrived = arrived_C.repeat_interleave(self.per_chunk)[: target.numel()]
        target.copy_(torch.where(arrived, self.decode(message, target.numel()).to(target.dtype), target))

    def _split(self, tensor: torch.Tensor) -> torch.Tensor:
        """Splits a vector into blocks (B, of); the last is padded with values that are chosen last."""
        missing = -tensor.numel() % self.code.of
        empty = torch.nan if self.code.bits == 16 else 0.0
        return torch.nn.functional.pad(tensor, (0, missing), value=empty).view(-1, self.code.of)

    def _runs(self, blocks: int) -> list[tuple[int, int]]:
        """First and last block of each chunk."""
        return [(first, min(first + self._blocks, blocks)) for first in range(0, blocks, self._blocks)]

    def _rooms(self, message: torch.Tensor) -> list[torch.Tensor]:
        packed = message.view(torch.uint8)
        return [packed[first : first + self._chunk_bytes] for first in range(0, packed.numel(), self._chunk_bytes)]


def _packed(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Packs small numbers (B, K) into bytes, the lowest bit of the first number first."""
    shifts = torch.arange(bits, dtype=torch.int16)
    flags = (numbers.unsqueeze(-1) >> shifts & 1).to(torch.uint8).reshape(len(numbers), -1, 8)
    return (flags << _SHIFTS).sum(-1, dtype=torch.uint8)


def _unpacked(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Returns the numbers (B, K) that were packed."""
    flags = (packed.unsqueeze(-1) >> _SHIFTS & 1).to(torch.int16).reshape(len(packed), -1)[:, : count * bits]
    return (flags.view(len(packed), count, bits) << torch.arange(bits, dtype=torch.int16)).sum(-1, dtype=torch.int16)

"""A model's parameters as one vector of chunks. A chunk is received or lost as a whole; each worker owns some."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

# Alignment of every parameter, as of a separate tensor: 64 bytes.
_ALIGNMENT = 16


@dataclass(frozen=True)
class Chunks:
    """The layout of parameters in C chunks of E elements each. The end of the last chunk is padding.

    Shards are whole chunks here. On real ranks, shards have nearly equal sizes and the last chunk of each is shorter.
    """

    shapes: tuple[torch.Size, ...]
    """Shapes of the parameters, in the model's order."""
    firsts: tuple[int, ...]
    """First element of each parameter in the vector."""
    count: int
    """Number of chunks, C."""
    per_chunk: int
    """Number of elements in a chunk, E."""
    owner_C: torch.Tensor
    """Owner of each chunk, ascending."""

    @classmethod
    def of(cls, parameters: Sequence[nn.Parameter], workers: int, per_chunk: int) -> Chunks:
        """Partitions a model's parameters into chunks, and the chunks among workers."""
        firsts, end = [], 0
        for parameter in parameters:
            firsts.append(end)
            end += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
        chunks = max(-(-end // per_chunk), 1)
        owner_C = torch.arange(chunks) * workers // chunks
        return cls(tuple(each.shape for each in parameters), tuple(firsts), chunks, per_chunk, owner_C)

    def views(self, vectors: torch.Tensor) -> list[torch.Tensor]:
        """Returns views of the parameters in a vector (C, E), or of those of all workers, stacked, in (W, C, E)."""
        stacked = vectors.shape[:-2]
        flat = vectors.view(*stacked, -1)
        return [
            flat[..., first : first + math.prod(shape)].view(*stacked, *shape)
            for first, shape in zip(self.firsts, self.shapes, strict=True)
        ]

    def choose(self, count: int, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Draws some elements of the parameters: returns chunk and offset in the chunk of each; never padding."""
        sizes = torch.tensor([math.prod(shape) for shape in self.shapes])
        ends = sizes.cumsum(0)
        nth_S = torch.randint(int(ends[-1]), (count,), generator=random)
        parameter_S = torch.searchsorted(ends, nth_S, right=True)
        at_S = nth_S + (torch.tensor(self.firsts) - (ends - sizes))[parameter_S]
        return at_S // self.per_chunk, at_S % self.per_chunk

    def empty(self, *stacked: int, device: torch.device) -> torch.Tensor:
        """Allocates memory for one vector, or for several. It is zeroed, as padding must not hold a NaN."""
        return torch.zeros(*stacked, self.count, self.per_chunk, device=device)

"""A model's parameters as one vector, cut into chunks: the unit that is lost. Each worker owns a run of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

# Every parameter begins at a multiple of this, as a tensor of its own would: 64 bytes.
_ALIGNMENT = 16


@dataclass(frozen=True)
class Cut:
    """Which element lies where. C chunks of E elements each; the end of the last one is padding.

    Shards are whole chunks here; a real training cuts them to the byte and lets the last chunk of each be shorter.
    """

    shapes: tuple[torch.Size, ...]
    """Of the parameters, in the model's order."""
    firsts: tuple[int, ...]
    """Where each begins in the vector."""
    chunks: int
    per_chunk: int
    owner_C: torch.Tensor
    """Of each chunk, in order."""

    @classmethod
    def of(cls, parameters: Sequence[nn.Parameter], workers: int, per_chunk: int) -> Cut:
        """The cut of a model for so many owners."""
        firsts, end = [], 0
        for parameter in parameters:
            firsts.append(end)
            end += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
        chunks = max(-(-end // per_chunk), 1)
        owner_C = torch.arange(chunks) * workers // chunks
        return cls(tuple(each.shape for each in parameters), tuple(firsts), chunks, per_chunk, owner_C)

    def views(self, vectors: torch.Tensor) -> list[torch.Tensor]:
        """Of (C, E), the parameters in it; of (W, C, E), the parameters of all W, stacked. Nothing is copied."""
        stacked = vectors.shape[:-2]
        flat = vectors.view(*stacked, -1)
        return [
            flat[..., first : first + math.prod(shape)].view(*stacked, *shape)
            for first, shape in zip(self.firsts, self.shapes, strict=True)
        ]

    def choose(self, count: int, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Chunks, and elements within them, of so many numbers of the parameters; none of them is padding."""
        sizes = torch.tensor([math.prod(shape) for shape in self.shapes])
        ends = sizes.cumsum(0)
        nth_S = torch.randint(int(ends[-1]), (count,), generator=random)
        parameter_S = torch.searchsorted(ends, nth_S, right=True)
        at_S = nth_S + (torch.tensor(self.firsts) - (ends - sizes))[parameter_S]
        return at_S // self.per_chunk, at_S % self.per_chunk

    def empty(self, *stacked: int, device: torch.device) -> torch.Tensor:
        """Memory for so many vectors, zeroed: padding must not hold what is not a number."""
        return torch.zeros(*stacked, self.chunks, self.per_chunk, device=device)

"""Rounds the values of virtual workers to the grids of the wires int8 and int4, as `engine/math/grid.cpp` does.

Each block of neighbours of a chunk has a grid between its least and its largest value, shifted at random by up to half
a step: rounding to the nearest point is unbiased. The shifts depend only on the seed, the sender and the
block, so that all processes draw the same ones. C chunks, E elements.
"""

import hashlib

import torch

from stormtorch.collectives.formats.grid import Grids


def round_to_grids_(values: torch.Tensor, grids: Grids, *, seed: tuple[int, ...], sender: int) -> None:
    """Rounds values (C, E), or (W, C, E) of several senders, in place. A block with an infinity or a NaN becomes NaN.

    Args:
        values: The values.
        grids: Bits of an element, and elements of a block.
        seed: Numbers that choose the grids' offsets.
        sender: Number of the first sender.
    """
    starts = range(0, values.shape[-1], grids.block_elements)
    rows = values.shape[:-1]
    first = sender * rows[-1] * len(starts)
    parts = _random_parts(seed, first, rows.numel() * len(starts), values.device).view(*rows, len(starts))
    for number, start in enumerate(starts):
        block = values[..., start : start + grids.block_elements]
        least, most = block.aminmax(dim=-1, keepdim=True)
        step = most / grids.steps - least / grids.steps
        # A step so small that it has no finite inverse: the block counts as constant. A NaN stays one.
        flat = ~(step >= torch.finfo(torch.float32).tiny)
        low = least + (0.5 - parts[..., number : number + 1]) * step
        codes = ((block - low) * step.reciprocal() + 0.5).floor_().clamp_(0.0, grids.steps)
        block.copy_(torch.where(flat, least, codes.mul_(step).add_(low)))


def _random_parts(seed: tuple[int, ...], first: int, count: int, device: torch.device) -> torch.Tensor:
    """Returns numbers in [0, 1): elements `first`, `first` + 1, ... of the sequence of a seed."""
    begin = int.from_bytes(hashlib.blake2b(repr(seed).encode(), digest_size=8).digest(), "little", signed=True)
    x = torch.arange(first, first + count, device=device).mul_(_odd(0x9E3779B97F4A7C15)).add_(begin)
    x = (x ^ _shifted(x, 30)).mul_(_odd(0xBF58476D1CE4E5B9))
    x = (x ^ _shifted(x, 27)).mul_(_odd(0x94D049BB133111EB))
    return _shifted(x ^ _shifted(x, 31), 40).float().mul_(2.0**-24)


def _odd(number: int) -> int:
    """Reinterprets an unsigned 64-bit integer as signed, for an int64 tensor."""
    return number - 2**64 if number >= 2**63 else number


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shifts right and fills with zeros, also where the highest bit is set."""
    return (x >> bits).bitwise_and_(2 ** (64 - bits) - 1)

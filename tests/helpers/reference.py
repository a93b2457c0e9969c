"""Bit-exact reference reductions, in one process and without code of the product."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch

from stormtorch.collectives import Op

ENGINE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (*ENGINE_DTYPES, torch.float64)
DTYPES = (*FLOATS, *INTEGERS, torch.bool, torch.complex64)

_FOLDS: dict[Op, Callable[[Any, Any], Any]] = {
    Op.SUM: operator.add,
    Op.AVG: operator.add,
    Op.PROD: operator.mul,
    Op.MIN: torch.minimum,
    Op.MAX: torch.maximum,
    Op.BAND: operator.and_,
    Op.BOR: operator.or_,
    Op.BXOR: operator.xor,
}


def ops_of(dtype: torch.dtype) -> list[Op]:
    """The operations that exist for a dtype."""
    if dtype.is_complex:
        return [Op.SUM, Op.AVG, Op.PROD]
    if dtype.is_floating_point:
        return [Op.SUM, Op.AVG, Op.PROD, Op.MIN, Op.MAX]
    return [op for op in Op if op is not Op.AVG or dtype in INTEGERS]


@functools.lru_cache(maxsize=400)
def _values(rank: int, elements: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1_000_003 * seed + 101 * rank + elements)
    if dtype.is_floating_point or dtype.is_complex:
        base = torch.float64 if dtype == torch.float64 else torch.float32
        sizes = 10.0 ** torch.randint(-2, 3, (elements,), generator=generator)
        real = torch.randn(elements, generator=generator, dtype=base) * sizes
        # Even halves show their order where ranks 0 and 2 cancel: what was added in between is gone.
        real[4::5] = 3e4 * (1 - rank) if rank in (0, 2) else 1e-6 * real[4::5]
        return (torch.complex(real, real.flip(0)) if dtype.is_complex else real).to(dtype)
    whole = torch.randint(-128, 256, (elements,), generator=generator)
    return whole % 2 == 0 if dtype == torch.bool else whole.to(dtype)


def values(rank: int, elements: int, dtype: torch.dtype = torch.float32, *, seed: int = 0) -> torch.Tensor:
    """A rank's contribution: for floats of all magnitudes and signs, so that another order of summation shows."""
    return _values(rank, elements, dtype, seed).clone()


def reduced(contributions: list[torch.Tensor], op: Op) -> torch.Tensor:
    """The reduction in rank order: engine dtypes are summed in float32 and rounded once."""
    n, dtype = len(contributions), contributions[0].dtype
    if op in (Op.SUM, Op.AVG) and dtype in ENGINE_DTYPES:
        total = functools.reduce(operator.add, [each.float() for each in contributions])
        return (total / n if op is Op.AVG else total).to(dtype)
    total = functools.reduce(_FOLDS[op], contributions)
    if op is not Op.AVG:
        return total
    return divided(total, n)


def divided(total: torch.Tensor, n: int) -> torch.Tensor:
    """A sum over n ranks as an average: complex numbers part by part, integers towards zero."""
    if total.is_complex():
        return torch.view_as_complex(torch.view_as_real(total) / n)
    return total / n if total.is_floating_point() else torch.div(total, n, rounding_mode="trunc")


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the last bit: unlike torch.equal it tells 0.0 from -0.0 and finds a NaN equal to itself."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    raw = [torch.view_as_real(each) if each.is_complex() else each for each in (a.contiguous(), b.contiguous())]
    return torch.equal(*(each.view(torch.uint8) for each in raw))

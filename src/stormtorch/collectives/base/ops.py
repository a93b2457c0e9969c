"""Reduce operations (SUM, AVG, MIN and others): their dtypes, and the reduction by torch in rank order."""

from collections.abc import Callable
from enum import Enum

import torch

from stormtorch.exchange.exchange import WIRE_DTYPES
from stormtorch.exchange.reliability import Reliability


class Op(Enum):
    """Reduce operation, as in torch.distributed."""

    SUM = "sum"
    AVG = "avg"
    PROD = "prod"
    MIN = "min"
    MAX = "max"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"


_FOLDS: dict[Op, Callable[..., torch.Tensor]] = {
    Op.SUM: torch.add,
    Op.AVG: torch.add,
    Op.PROD: torch.mul,
    Op.MIN: torch.minimum,
    Op.MAX: torch.maximum,
    Op.BAND: torch.bitwise_and,
    Op.BOR: torch.bitwise_or,
    Op.BXOR: torch.bitwise_xor,
}


_INTEGERS = {getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)}
REDUCIBLE = {
    torch.bool,
    *_INTEGERS,
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128),
}
"""Types with arithmetic. All others, such as float8, can be sent but not reduced."""


def check(tensor: torch.Tensor, op: Op, reliability: Reliability) -> None:
    """Raises ValueError if the operation does not exist for the tensor's type, or cannot be lossy but is."""
    if tensor.dtype not in REDUCIBLE:
        raise ValueError(
            f"{op.name} of {tensor.dtype} does not exist: convert the tensor first, for example to float32"
        )
    if op in (Op.BAND, Op.BOR, Op.BXOR) and (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"{op.name} needs integers or booleans, got {tensor.dtype}")
    if op is Op.AVG and tensor.dtype is torch.bool:
        raise ValueError("AVG needs numbers, got torch.bool: convert the tensor first, for example to float32")
    if op in (Op.MIN, Op.MAX) and tensor.is_complex():
        raise ValueError(f"{op.name} is not defined for {tensor.dtype}")
    if not reliability.exact and not on_arrival(tensor, op):
        raise ValueError(
            f"{op.name} of {tensor.dtype} must be exact: only SUM and AVG of float32, bfloat16 and float16 may be lossy"
        )


def on_arrival(tensor: torch.Tensor, op: Op) -> bool:
    """Whether the engine reduces chunks itself, as they arrive."""
    return op in (Op.SUM, Op.AVG) and tensor.dtype in WIRE_DTYPES


def fold(contributions: list[torch.Tensor], op: Op, out: torch.Tensor) -> None:
    """Reduces contributions in the order of the list, so that every rank gets the same bits."""
    signed = _SIGNED.get(out.dtype)
    if signed is not None:
        _fold_unsigned(contributions, op, out, signed)
        return
    result = contributions[0].clone()
    for contribution in contributions[1:]:
        _FOLDS[op](result, contribution, out=result)
    if op is Op.AVG:
        _divide(result, len(contributions))
    out.copy_(result)


def _divide(total: torch.Tensor, by: int) -> None:
    """Divides in place. Integers are rounded towards zero, as NCCL does."""
    if total.is_complex():
        _divide(torch.view_as_real(total), by)  # both parts alike: torch.distributed passes some as two reals anyway
    elif total.is_floating_point():
        total /= by
    else:
        total.div_(by, rounding_mode="trunc")


# torch has no arithmetic for these types. Sums, products and bit operations are those of the signed type; MIN and MAX
# compare with the top bit flipped.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def _fold_unsigned(contributions: list[torch.Tensor], op: Op, out: torch.Tensor, signed: torch.dtype) -> None:
    flip = torch.iinfo(signed).min if op in (Op.MIN, Op.MAX) else 0
    result = out.view(signed)
    fold([each.view(signed) ^ flip for each in contributions], Op.SUM if op is Op.AVG else op, result)
    result ^= flip
    if op is Op.AVG:
        _divide_unsigned(result, len(contributions))


def _divide_unsigned(total: torch.Tensor, by: int) -> None:
    """Divides unsigned numbers stored in a signed type.

    Half of such a number is never negative. Twice the quotient of that half is the result, or one less than it.
    """
    if by == 1:
        return
    half = (total >> 1) & torch.iinfo(total.dtype).max
    quotient = half.div_(by, rounding_mode="trunc") * 2
    rest = total - quotient * by  # in [0, 2 * by)
    total.copy_(quotient + (rest >= by))

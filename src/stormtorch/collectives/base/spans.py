"""Tensors as the engine sees them: an address and a length in bytes."""

import torch

from stormtorch.exchange.reliability import Reliability

_ALIGNMENT_BYTES = 64


def address(tensor: torch.Tensor, what: str) -> int:
    """Returns the address of a contiguous CPU tensor. Raises ValueError for any other, naming the argument `what`."""
    if tensor.device.type != "cpu":
        raise ValueError(f"{what} must be on the CPU, got {tensor.device}")
    if not tensor.is_contiguous():
        raise ValueError(f"{what} must be contiguous: call .contiguous() and copy the result back")
    return tensor.data_ptr()


def size(tensor: torch.Tensor) -> int:
    """Returns the bytes of a contiguous tensor."""
    return tensor.numel() * tensor.element_size()


def check_lossy(tensor: torch.Tensor, reliability: Reliability, what: str) -> None:
    """Raises ValueError if a lossy message is not floating-point: a part of an index or pickled object is useless."""
    if not reliability.exact and not tensor.is_floating_point():
        raise ValueError(f"{what} of {tensor.dtype} must be exact: only floating-point tensors may be lossy")


def shards(elements: int, element_bytes: int, count: int) -> list[tuple[int, int]]:
    """Partitions a vector into `count` nearly equal shards, in order: (first element, elements). Some may be empty."""
    align = max(_ALIGNMENT_BYTES // element_bytes, 1)
    each = -(-elements // count)
    each = -(-each // align) * align
    return [(min(i * each, elements), max(min(each, elements - i * each), 0)) for i in range(count)]


def check_same(tensor: torch.Tensor, like: torch.Tensor, what: str) -> None:
    """Raises ValueError unless the tensor has the dtype and the number of elements of `like`."""
    if tensor.dtype != like.dtype or tensor.numel() != like.numel():
        raise ValueError(f"{what} must have {like.numel()} x {like.dtype}, got {tensor.numel()} x {tensor.dtype}")

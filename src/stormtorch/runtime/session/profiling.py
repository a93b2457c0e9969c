"""Ranges for torch's profiler: both stages of a step, bucket by bucket, with the bytes that are sent."""

import contextlib

import torch

from stormtorch.collectives.wire import element_bytes

_NOTHING = contextlib.nullcontext()


def profiler_range(
    what: str, bucket: int, elements: int, dtype: torch.dtype
) -> contextlib.AbstractContextManager[object]:
    """Returns a context that records a range in the profiler; an empty one if no profiler runs in this thread.

    Args:
        what: Name of the operation.
        bucket: Number of the bucket.
        elements: Number of elements in the bucket.
        dtype: Number format in which they travel.
    """
    if not torch._C._autograd._profiler_enabled():
        return _NOTHING
    name = f"storm::{what} bucket {bucket}, {_size(round(elements * element_bytes(dtype)))}"
    event: contextlib.AbstractContextManager[object] = torch._C._profiler._RecordFunctionFast(name)
    return event


def _size(count: int) -> str:
    if count >= 100_000:
        return f"{count / 1e6:.1f} MB"
    return f"{count / 1e3:.1f} KB" if count >= 1000 else f"{count} B"

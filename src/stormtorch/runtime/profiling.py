"""What the profiler shows of a step: both stages, bucket by bucket, with the bytes that travel."""

import contextlib

import torch

_NOTHING = contextlib.nullcontext()


def shown(what: str, bucket: int, elements: int, dtype: torch.dtype) -> contextlib.AbstractContextManager[object]:
    """An event of the profiler as long as it is entered; nothing where none runs in this thread.

    Args:
        what: The operation.
        bucket: Which bucket.
        elements: Of the bucket.
        dtype: As which they travel.
    """
    if not torch._C._autograd._profiler_enabled():
        return _NOTHING
    name = f"storm::{what} bucket {bucket}, {_size(elements * dtype.itemsize)}"
    event: contextlib.AbstractContextManager[object] = torch._C._profiler._RecordFunctionFast(name)
    return event


def _size(count: int) -> str:
    if count >= 100_000:
        return f"{count / 1e6:.1f} MB"
    return f"{count / 1e3:.1f} KB" if count >= 1000 else f"{count} B"

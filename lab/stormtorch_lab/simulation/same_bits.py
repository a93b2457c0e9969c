"""Deterministic GPU computation: the same bits every time, at some cost of speed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextlib.contextmanager
def same_bits(wanted: bool) -> Iterator[None]:
    """Has torch use deterministic algorithms only; restores what it did before.

    Sums of many numbers are otherwise added in whatever order the GPU's threads arrive, and `torch.compile` chooses
    kernels by which was fastest a moment ago. In early training, the last bit may grow to a percent of perplexity.
    """
    if not wanted:
        yield
        return
    # cuBLAS may add up in another order when it shares its workspace between streams; torch insists on this setting.
    os.environ.setdefault(_WORKSPACE, ":4096:8")
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic  # torch's type stubs are incomplete
    fills = memory.fill_uninitialized_memory
    tries = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    # Memory that is read before it is written would be a mistake of the model's own; looking for it takes time.
    memory.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False
    try:
        with _fixed_kernels():
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = fills
        torch.backends.cudnn.benchmark = tries


def _fixed_kernels() -> contextlib.AbstractContextManager[object]:
    """Has `torch.compile` choose kernels by rules, and not by the time that each of them takes."""
    from torch._inductor import config

    found: contextlib.AbstractContextManager[object] = config.patch(deterministic=True)
    return found

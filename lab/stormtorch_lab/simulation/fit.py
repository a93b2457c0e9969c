"""Finds how many workers fit into memory at a time, from the measured memory of one."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from stormtorch_lab.simulation.setting import Setting

# On a CPU, more replicas at a time only compete for caches and memory.
_CPU_BYTES = 1 << 30
_CPU_MOST = 16
# Fraction of the GPU's free memory to use; the rest is for versions, recorded graphs, and fragmentation.
_GPU_SHARE = 0.5


def fitting(setting: Setting, model: nn.Module, batches: Callable[[int, int, int], Any], workers: int) -> Setting:
    """Returns the setting with as many workers at a time as fit: a divisor of `workers` where a good one exists."""
    if setting.reuse is not None and setting.reuse.gradients is not None:
        return setting.with_at_once(setting.reuse.gradients.at_once)
    replica_bytes = 4 * setting.chunks.count * setting.chunks.per_chunk
    if setting.device.type != "cuda":
        fit = max(min(_CPU_BYTES // (4 * replica_bytes), _CPU_MOST), 1)
        return setting.with_at_once(_even(workers, fit))
    torch.cuda.reset_peak_memory_stats(setting.device)
    before = torch.cuda.memory_allocated(setting.device)
    trial = setting.for_trial().gradients(model, 1)
    with torch.random.fork_rng([setting.device]):
        trial.compute(batches(0, 0, 1), 0, 1)
    each = torch.cuda.max_memory_allocated(setting.device) - before
    del trial
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(setting.device)
    fit = max(int(_GPU_SHARE * (total if setting.deterministic else free) / max(each, 1)), 1)
    if setting.deterministic:
        # The order of sums depends on it, so it must not depend on what else has memory, nor on a few bytes.
        fit = 1 << fit.bit_length() - 1
    return setting.with_at_once(_even(workers, fit))


def _even(workers: int, fit: int) -> int:
    """Returns a group size of at most `fit`, which makes all groups equal if it need not be much smaller for that."""
    if workers <= fit:
        return workers
    return next((size for size in range(fit, fit // 2, -1) if workers % size == 0), fit)

"""Divides virtual workers among the processes of torchrun; all-reduces their results."""

import os
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class Processes:
    """The processes that simulate together; a single one unless several were launched.

    Every process draws the same losses and runs the same optimizer, so only sums are communicated.
    """

    def __init__(self) -> None:
        self.on = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if self.on else 0
        self.world = dist.get_world_size() if self.on else 1
        # NCCL accepts only tensors on a GPU.
        self._only_gpu = self.on and dist.get_backend() == "nccl"

    def part(self, workers: int) -> tuple[int, int]:
        """Returns the first worker of this process, and the one after its last."""
        return self.rank * workers // self.world, (self.rank + 1) * workers // self.world

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replaces a tensor by its sum over all processes, and returns it."""
        if self.on:
            sent = tensor.cuda() if self._only_gpu else tensor
            dist.all_reduce(sent)
            if sent is not tensor:
                tensor.copy_(sent)
        return tensor

    def all_reduce_max(self, value: int) -> int:
        """Returns the largest value that any process has."""
        if not self.on:
            return value
        found = torch.tensor(value, device="cuda" if self._only_gpu else "cpu")
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)

    def broadcast_first(self, value: T) -> T:
        """Returns the first process's value, which must be picklable."""
        if not self.on:
            return value
        held = [value]
        dist.broadcast_object_list(held, src=0)
        return held[0]

    def everyone(self, own: torch.Tensor, workers: int) -> torch.Tensor:
        """Returns values (W, ...) of all workers, given those of this process's workers."""
        if not self.on:
            return own
        first, last = self.part(workers)
        whole = own.new_zeros(workers, *own.shape[1:])
        whole[first:last] = own
        return self.all_reduce(whole)


def launched() -> bool:
    """Whether torchrun or the like has started several processes."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def join(device: torch.device) -> None:
    """Joins the process group, if there are several processes; each uses its own GPU if there are enough."""
    if not launched() or dist.is_initialized():
        return
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    if gpus:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % gpus)
    # gloo also carries tensors on GPUs, and lets several processes share one.
    enough = gpus >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")) and device.index is None
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus and enough else "gloo")


def leave() -> None:
    """Leaves the process group that `join` entered; the last call of a process."""
    if launched() and dist.is_initialized():
        dist.destroy_process_group()


def first() -> bool:
    """Whether this process is the one that prints and writes files."""
    return int(os.environ.get("RANK", "0")) == 0

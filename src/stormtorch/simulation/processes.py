"""Virtual workers split over the ranks of torchrun: each computes some, and all add up what they found."""

import os
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class Together:
    """The processes that simulate together; one alone where nothing was launched.

    Every process draws the same losses and runs the same optimizer, so sums are all that has to travel.
    """

    def __init__(self) -> None:
        self.on = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if self.on else 0
        self.world = dist.get_world_size() if self.on else 1
        # NCCL takes nothing that is not on a GPU.
        self._only_gpu = self.on and dist.get_backend() == "nccl"

    def part(self, workers: int) -> tuple[int, int]:
        """The first of this process's workers, and the one after its last."""
        return self.rank * workers // self.world, (self.rank + 1) * workers // self.world

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all processes; in place."""
        if self.on:
            sent = tensor.cuda() if self._only_gpu else tensor
            dist.all_reduce(sent)
            if sent is not tensor:
                tensor.copy_(sent)
        return tensor

    def agree(self, value: int) -> int:
        """The largest that any process has."""
        if not self.on:
            return value
        found = torch.tensor(value, device="cuda" if self._only_gpu else "cpu")
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)

    def from_first(self, value: T) -> T:
        """What the first process has; must be picklable."""
        if not self.on:
            return value
        held = [value]
        dist.broadcast_object_list(held, src=0)
        return held[0]

    def everyone(self, own: torch.Tensor, workers: int) -> torch.Tensor:
        """(W_own, ...) of this process's workers becomes (W, ...) of all."""
        if not self.on:
            return own
        first, last = self.part(workers)
        whole = own.new_zeros(workers, *own.shape[1:])
        whole[first:last] = own
        return self.add_up(whole)


def launched() -> bool:
    """Whether torchrun or the like has started several processes."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def join(device: torch.device) -> None:
    """Meets the other processes, if there are any; each takes a GPU of its own where there are enough."""
    if not launched() or dist.is_initialized():
        return
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    if gpus:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % gpus)
    # gloo carries tensors of GPUs, too, and several processes may share one.
    enough = gpus >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")) and device.index is None
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus and enough else "gloo")


def leave() -> None:
    """Of processes that met; the last thing to do."""
    if launched() and dist.is_initialized():
        dist.destroy_process_group()


def first() -> bool:
    """Whether this process is the one that talks and writes."""
    return int(os.environ.get("RANK", "0")) == 0

"""Virtual workers split over the ranks of torchrun: each computes some, and all add up what they found."""

import os

import torch
import torch.distributed as dist


class Together:
    """The processes that simulate together; one alone where nothing was launched.

    Every process draws the same losses and runs the same optimizer, so sums are all that has to travel.
    """

    def __init__(self) -> None:
        self.on = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if self.on else 0
        self.world = dist.get_world_size() if self.on else 1

    def part(self, workers: int) -> tuple[int, int]:
        """The first of this process's workers, and the one after its last."""
        return self.rank * workers // self.world, (self.rank + 1) * workers // self.world

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all processes; in place."""
        if self.on:
            dist.all_reduce(tensor)
        return tensor

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
    """Meets the other processes, if there are any."""
    if launched() and not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" and torch.cuda.device_count() > 1 else "gloo")

"""A rank of a job under torchrun, with each level of TORCH_DISTRIBUTED_DEBUG. Prints the errors of misuse."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Network(nn.Module):
    """One of its layers gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.used(given)  # type: ignore[no-any-return]


def say(level: str, what: str, error: Exception) -> None:
    line = " ".join(str(error).split())
    os.write(1, f"{level} rank {dist.get_rank()} {what}: {line}\n".encode())  # in one piece


def work(level: str) -> None:
    dist.init_process_group("storm")
    assert dist.get_debug_level().name == level  # type: ignore[attr-defined]
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    dist.all_reduce(tensor, group=dist.new_group([0, 1]))
    assert tensor.tolist() == [4.0] * 3

    model = DistributedDataParallel(Network(), find_unused_parameters=True)
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
    strict = DistributedDataParallel(Network())
    strict(torch.ones(2, 4)).sum().backward()
    try:
        strict(torch.ones(2, 4))
    except RuntimeError as error:
        say(level, "unused", error)
    try:
        dist.all_reduce(torch.ones(3 + dist.get_rank()))
    except RuntimeError as error:
        say(level, "sizes", error)
    dist.destroy_process_group()


torch.set_num_threads(1)
for each in ("INFO", "DETAIL"):
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = each
    dist.set_debug_level_from_env()  # type: ignore[attr-defined]
    work(each)

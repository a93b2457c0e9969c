# mypy: disable-error-code="no-untyped-call"
"""The tools that look at the backend "storm" or through it: the profiler, torch.compile and TORCH_DISTRIBUTED_DEBUG."""

from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from stormtorch.bench.ranks import Member, run_ranks

gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def profiled(member: Member) -> list[tuple[str, list[Any]]]:
    """Calls everything once under the profiler and returns the events' names and shapes."""
    dist.init_process_group("storm", store=member.store, rank=member.rank, world_size=member.world)
    other = 1 - member.rank
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        dist.all_reduce(torch.ones(2, 3))
        dist.broadcast(torch.ones(4), 0)
        dist.reduce(torch.ones(5), 0)
        dist.all_gather([torch.empty(2, 2)] * 2, torch.ones(2, 2))
        gather_single(torch.empty(6), torch.ones(3))
        reduce_scatter_single(torch.empty(4), torch.ones(8))
        dist.reduce_scatter(torch.empty(2), [torch.ones(2), torch.ones(2)])
        dist.all_to_all_single(torch.empty(2, 7), torch.ones(2, 7))
        dist.gather(torch.ones(9), [torch.empty(9)] * 2 if member.rank == 0 else None, 0)
        dist.scatter(torch.empty(10), [torch.ones(10)] * 2 if member.rank == 0 else None, 0)
        if member.rank == 0:
            dist.send(torch.ones(11), other)
        else:
            dist.recv(torch.empty(11), other)
        dist.barrier()
    dist.destroy_process_group()
    return [(event.name, event.input_shapes) for event in seen.events() if event.name.startswith("storm::")]


def test_profiler_shows_every_operation_with_the_sizes_of_its_inputs() -> None:
    root, other = run_ranks(profiled, 2, timeout_s=60)
    assert root == [
        ("storm::all_reduce", [[2, 3]]),
        ("storm::broadcast", [[4]]),
        ("storm::reduce", [[5]]),
        ("storm::all_gather", [[2, 2]]),
        ("storm::all_gather", [[3]]),
        ("storm::reduce_scatter", [[8]]),
        ("storm::reduce_scatter", [[2], [2]]),
        ("storm::all_to_all", [[2, 7]]),
        ("storm::gather", [[9]]),
        ("storm::scatter", [[10], [10]]),
        ("storm::send", [[11]]),
        ("storm::barrier", []),
    ]
    assert other[9:11] == [("storm::scatter", []), ("storm::recv", [[11]])]

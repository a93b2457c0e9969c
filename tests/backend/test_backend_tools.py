"""The tools that look at the backend "storm" or through it: the profiler, torch.compile and TORCH_DISTRIBUTED_DEBUG."""
# mypy: disable-error-code="no-untyped-call"

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from stormtorch_lab.jobs.ranks import Member, run_ranks

pytestmark = pytest.mark.pure

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


def compiled_model(member: Member) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(16, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
    # Several buckets: the compiler then cuts the graph where they end.
    model = DistributedDataParallel(layers, bucket_cap_mb=1)
    fast = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        torch.manual_seed(10 * step + member.rank)
        fast(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [each.detach().clone() for each in model.parameters()]


def compiled_collectives(member: Member) -> list[torch.Tensor]:
    group = list(range(member.world))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def everything(given: torch.Tensor) -> list[torch.Tensor]:
        doubled = given * 2
        total = functional.all_reduce(doubled, "sum", group)
        gathered = functional.all_gather_tensor(total + given, 0, group)
        scattered = functional.reduce_scatter_tensor(gathered * given.mean(), "sum", 0, group)
        splits = [scattered.size(0) // 2] * 2
        exchanged = functional.all_to_all_single(scattered, splits, splits, group)
        shared = functional.broadcast(exchanged + 1, 1, group)
        both = functional.all_reduce_coalesced([shared, scattered], "max", group)
        return [total, gathered, scattered, exchanged, shared, *both]

    torch.manual_seed(member.rank)
    return [each.clone() for each in everything(torch.randn(6, 5))]


def compile_job(member: Member) -> None:
    results = []
    for backend in ("storm", "gloo"):
        store = dist.PrefixStore(backend, member.store)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=member.rank, world_size=member.world)
        results.append(compiled_model(member) + compiled_collectives(member))
        torch.compiler.reset()  # the groups' names stand in the graphs
        dist.barrier()
        dist.destroy_process_group()
    ours, theirs = results
    assert len(ours) == len(theirs) == 13
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other), (one, other)


def test_compiled_model_and_compiled_collectives_give_bit_for_bit_what_gloo_gives() -> None:
    run_ranks(compile_job, 2, timeout_s=110)


@pytest.mark.thorough
def test_debug_levels_of_torch_work_under_torchrun(tmp_path: Path) -> None:
    script = str(Path(__file__).parents[1] / "helpers" / "backend_debugged.py")
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script]
    done = subprocess.run(
        words, env=os.environ | {"STORM_FLIGHT_DIR": str(tmp_path)}, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for level in ("INFO", "DETAIL"):
        for rank in (0, 1):
            assert f"{level} rank {rank} unused: Expected to have finished reduction" in done.stdout
            # The names, which torch gives only at these levels.
            assert f"did not receive grad for rank {rank}: idle.bias, idle.weight" in done.stdout
            assert f"{level} rank {rank} sizes: rank {rank}: all_reduce" in done.stdout
        assert "12 bytes where 16 are expected" in done.stdout or "16 bytes where 12 are expected" in done.stdout

# mypy: disable-error-code="attr-defined, name-defined, arg-type, union-attr, no-untyped-call, return-value, assignment"
# What fully_shard and parallelize_module return is more than they declare.
"""What is built on torch.distributed, on storm and on gloo in the same processes: the numbers must be the same."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from stormtorch_lab.jobs.ranks import Member, run_ranks


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))


def meshes(member: Member, backend: str, prefix: str, shape: tuple[int, ...]) -> DeviceMesh:
    dist.init_process_group(
        backend, store=dist.PrefixStore(prefix, member.store), rank=member.rank, world_size=member.world
    )
    names = ("replica", "shard")[-len(shape) :]
    return dist.init_device_mesh("cpu", shape, mesh_dim_names=names)


def steps(
    model: nn.Module, rank: int, count: int = 3, optimizer: torch.optim.Optimizer | None = None
) -> torch.optim.Optimizer:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(count):
        torch.manual_seed(100 * step + rank)
        model(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def whole(model: nn.Module) -> list[torch.Tensor]:
    tensors = [each.detach() for each in model.parameters()]
    return [each.full_tensor() if isinstance(each, DTensor) else each.clone() for each in tensors]


def sharded(member: Member, mesh: DeviceMesh) -> list[torch.Tensor]:
    model = fully_shard(network(), mesh=mesh)
    steps(model, member.rank)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return whole(model)


def tensor_parallel(member: Member, mesh: DeviceMesh) -> list[torch.Tensor]:
    model = parallelize_module(network(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    steps(model, 0)
    matrix = distribute_tensor(torch.arange(32.0).view(8, 4), mesh, [Shard(0)])
    moved = matrix.redistribute(mesh, [Shard(1)]).redistribute(mesh, [Replicate()])
    return [*whole(model), moved.to_local()]


def power_sgd(member: Member, mesh: DeviceMesh) -> list[torch.Tensor]:
    model = DistributedDataParallel(network())
    model.register_comm_hook(
        PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5), powerSGD_hook
    )
    steps(model, member.rank, 5)
    return whole(model)


def pipeline(member: Member, mesh: DeviceMesh) -> list[torch.Tensor]:
    layers = list(network())
    part = nn.Sequential(*(layers[:2] if member.rank == 0 else layers[2:]))
    stage = PipelineStage(part, member.rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=lambda out, goal: (out - goal).square().mean())
    torch.manual_seed(3)
    inputs, goals = torch.randn(4, 16), torch.randn(4, 8)
    if member.rank == 0:
        schedule.step(inputs)
    else:
        schedule.step(target=goals)
    return [each.grad.clone() for each in part.parameters() if each.grad is not None]


def checkpoint(member: Member, mesh: DeviceMesh) -> list[torch.Tensor]:
    model = fully_shard(network(), mesh=mesh)
    steps(model, member.rank)
    folder = [tempfile.mkdtemp() if member.rank == 0 else None]
    dist.broadcast_object_list(folder, 0)
    assert folder[0] is not None
    # A group of its own for the thread that saves: collectives of two threads in one group have no order.
    saving = dcp.async_save(
        {"model": model.state_dict()}, checkpoint_id=Path(folder[0], "late"), process_group=dist.new_group()
    )
    dcp.save({"model": model.state_dict()}, checkpoint_id=Path(folder[0], "now"))
    saving.result()
    loaded = []
    for name in ("now", "late"):
        other = fully_shard(network(), mesh=mesh)
        state = {"model": other.state_dict()}
        dcp.load(state, checkpoint_id=Path(folder[0], name))
        other.load_state_dict(state["model"])
        loaded += whole(other)
    return loaded


def fsdp1(member: Member, mesh: DeviceMesh) -> list[torch.Tensor]:
    model = FullyShardedDataParallel(
        network(),
        auto_wrap_policy=ModuleWrapPolicy([nn.Linear]),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    optimizer = steps(model, member.rank)
    state = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
    with FullyShardedDataParallel.summon_full_params(model):
        return [*whole(model), *(each for one in state.values() for each in one.values())]


def zero_redundancy(member: Member, mesh: DeviceMesh) -> list[torch.Tensor]:
    model = DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    steps(model, member.rank, optimizer=optimizer)
    optimizer.consolidate_state_dict(0)
    state = optimizer.state_dict()["state"].values() if member.rank == 0 else ()
    return [*whole(model), *(each for one in state for each in one.values())]


def accumulation(member: Member, mesh: DeviceMesh) -> list[torch.Tensor]:
    model = DistributedDataParallel(network(), bucket_cap_mb=0.001)
    torch.manual_seed(member.rank)
    with model.no_sync():
        for _ in range(3):
            model(torch.randn(4, 16)).square().mean().backward()
    model(torch.randn(4, 16)).square().mean().backward()
    return [each.grad.clone() for each in model.parameters()]


def static_graph(member: Member, mesh: DeviceMesh) -> list[torch.Tensor]:
    model = DistributedDataParallel(network(), bucket_cap_mb=0.001, static_graph=True, gradient_as_bucket_view=True)
    steps(model, member.rank)
    return whole(model)


def uneven_inputs(member: Member, mesh: DeviceMesh) -> list[torch.Tensor]:
    model = DistributedDataParallel(network())
    with model.join():
        steps(model, member.rank, 2 + 3 * member.rank)
    return whole(model)


class Branches(nn.Module):
    """Uses one of two layers: which one depends on the rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.trunk, self.branches, self.rank = network(), nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]), rank

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.branches[self.rank](self.trunk(given))
        return out


def unused_parameters(member: Member, mesh: DeviceMesh) -> list[torch.Tensor]:
    model = DistributedDataParallel(Branches(member.rank), find_unused_parameters=True)
    steps(model, member.rank)
    return whole(model)


def bf16_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return bf16_compress_hook(state, bucket)  # by its own name, DDP refuses it without a GPU


def compressed(member: Member, mesh: DeviceMesh) -> list[torch.Tensor]:
    # Of two contributions the sum is rounded once, in whatever order and width it is made.
    found = []
    for hook in (fp16_compress_hook, bf16_hook):
        model = DistributedDataParallel(network())
        model.register_comm_hook(None, hook)
        steps(model, member.rank)
        found += whole(model)
    return found


def local_sgd(member: Member, mesh: DeviceMesh) -> list[torch.Tensor]:
    model = DistributedDataParallel(network())
    state = PostLocalSGDState(None, dist.new_subgroups(1)[0], start_localSGD_iter=2)
    model.register_comm_hook(state, post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), PeriodicModelAverager(period=2, warmup_steps=2)
    )
    steps(model, member.rank, 6, optimizer)
    return whole(model)


CASES: dict[str, tuple[Callable[[Member, DeviceMesh], list[torch.Tensor]], tuple[int, ...]]] = {
    "fsdp2": (sharded, (2,)),
    "hsdp": (sharded, (2, 1)),
    "tensor parallel": (tensor_parallel, (2,)),
    "powersgd": (power_sgd, (2,)),
    "pipeline": (pipeline, (2,)),
    "checkpoint": (checkpoint, (2,)),
    "fsdp1": (fsdp1, (2,)),
    "zero redundancy": (zero_redundancy, (2,)),
    "accumulation": (accumulation, (2,)),
    "static graph": (static_graph, (2,)),
    "uneven inputs": (uneven_inputs, (2,)),
    "unused parameters": (unused_parameters, (2,)),
    "compressed": (compressed, (2,)),
    "local sgd": (local_sgd, (2,)),
}
TOGETHER = [
    *([name] for name in ("fsdp2", "hsdp", "tensor parallel", "powersgd", "pipeline", "checkpoint")),
    ["fsdp1", "zero redundancy"],
    ["accumulation", "static graph", "uneven inputs", "unused parameters", "compressed", "local sgd"],
]
"""Which cases share their processes, as those take longer to start than any case."""


def job(member: Member, names: list[str]) -> None:
    torch.set_num_threads(1)
    for name in names:
        compare(member, name)


def compare(member: Member, name: str) -> None:
    case, shape = CASES[name]
    results = []
    for backend in ("storm", "gloo"):
        mesh = meshes(member, backend, f"{name}/{backend}", shape)
        results.append(case(member, mesh))
        dist.barrier()
        dist.destroy_process_group()
    ours, theirs = results
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other), (name, (one - other).abs().max())


@pytest.mark.thorough
@pytest.mark.parametrize("names", TOGETHER, ids=", ".join)
def test_it_gives_bit_for_bit_what_it_gives_on_gloo(names: list[str]) -> None:
    run_ranks(job, 2, (names,), timeout_s=120)

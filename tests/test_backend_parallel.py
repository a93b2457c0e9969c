# mypy: disable-error-code="attr-defined, arg-type, union-attr, no-untyped-call, return-value, assignment"
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
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from stormtorch.bench.ranks import Member, run_ranks


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))


def meshes(member: Member, backend: str, shape: tuple[int, ...]) -> DeviceMesh:
    dist.init_process_group(
        backend, store=dist.PrefixStore(backend, member.store), rank=member.rank, world_size=member.world
    )
    names = ("replica", "shard")[-len(shape) :]
    return dist.init_device_mesh("cpu", shape, mesh_dim_names=names)


def steps(model: nn.Module, rank: int, count: int = 3) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(count):
        torch.manual_seed(100 * step + rank)
        model(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


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


CASES: dict[str, tuple[Callable[[Member, DeviceMesh], list[torch.Tensor]], tuple[int, ...]]] = {
    "fsdp2": (sharded, (2,)),
    "hsdp": (sharded, (2, 1)),
    "tensor parallel": (tensor_parallel, (2,)),
    "powersgd": (power_sgd, (2,)),
    "pipeline": (pipeline, (2,)),
    "checkpoint": (checkpoint, (2,)),
}


def job(member: Member, name: str) -> None:
    torch.set_num_threads(1)
    case, shape = CASES[name]
    results = []
    for backend in ("storm", "gloo"):
        mesh = meshes(member, backend, shape)
        results.append(case(member, mesh))
        dist.barrier()
        dist.destroy_process_group()
    ours, theirs = results
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other), (name, (one - other).abs().max())


@pytest.mark.parametrize("name", CASES)
def test_it_gives_bit_for_bit_what_it_gives_on_gloo(name: str) -> None:
    run_ranks(job, 2, (name,), timeout_s=120)

"""Tensors on a GPU, with several ranks on the same one. Skipped without a GPU, as on most machines that run tests."""
# mypy: disable-error-code="attr-defined, arg-type, no-untyped-call, assignment"

import itertools
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import stormtorch
from stormtorch_lab.jobs.ranks import Member, run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
WORLDS = pytest.mark.parametrize("world", [2, 4])
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.uint8]


def start(member: Member, backend: str = "storm", **more: Any) -> None:
    torch.cuda.set_device(0)
    store = dist.PrefixStore(backend, member.store)
    dist.init_process_group(backend, store=store, rank=member.rank, world_size=member.world, **more)


def busy(seconds: float = 0.05) -> None:
    """Keeps the current stream at work: what comes after on it happens later."""
    torch.cuda._sleep(int(seconds * 1.5e9))


def collectives(member: Member) -> None:
    start(member)
    rank, world = member.rank, member.world
    for dtype in DTYPES:

        def ones(value: float, *shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.full(shape, value, dtype=dtype, device="cuda")

        tensor = torch.empty(1000, 3, dtype=dtype, device="cuda")
        busy()
        tensor.fill_(rank + 1)  # on the stream, after the work: the collective must wait for it
        dist.all_reduce(tensor)
        assert torch.equal(tensor, ones(world * (world + 1) / 2, 1000, 3)), dtype
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        tensor = ones(rank, 5)
        dist.broadcast(tensor, 1)
        assert torch.equal(tensor, ones(1, 5))
        dist.reduce(tensor, 0)
        assert torch.equal(tensor, ones(world if rank == 0 else 1, 5))
        gathered = [ones(-1 if dtype.is_signed else 7, 4) for _ in range(world)]
        dist.all_gather(gathered, ones(rank, 4))
        assert [int(each[0]) for each in gathered] == list(range(world))
        flat = ones(9, 3 * world)
        dist.all_gather_into_tensor(flat, ones(rank, 3))
        assert flat.tolist() == [peer for peer in range(world) for _ in range(3)]
        out = ones(9, 2)
        dist.reduce_scatter_tensor(out, torch.arange(2 * world, device="cuda").to(dtype))
        assert out.tolist() == [world * (2 * rank), world * (2 * rank + 1)]
        swapped = ones(9, world)
        dist.all_to_all_single(swapped, torch.arange(world, device="cuda").add(10 * rank).to(dtype))
        assert swapped.tolist() == [10 * peer + rank for peer in range(world)]
        lists = [ones(9, 2) for _ in range(world)] if rank == 0 else None
        dist.gather(ones(rank, 2), lists)
        assert lists is None or [int(each[1]) for each in lists] == list(range(world))
        mine = ones(9, 2)
        dist.scatter(mine, [ones(peer + 3, 2) for peer in range(world)] if rank == 0 else None)
        assert mine.tolist() == [rank + 3, rank + 3]
        if rank < 2:
            message = ones(40 + rank, 6)
            if rank == 0:
                dist.send(message, 1)
            else:
                dist.recv(message, 0)
            assert int(message[0]) == 40
    wide = torch.arange(12.0, device="cuda").view(3, 4).t()
    dist.all_reduce(wide)
    assert torch.equal(wide, world * torch.arange(12.0, device="cuda").view(3, 4).t())
    dist.all_reduce(torch.empty(0, device="cuda"))
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": peer} for peer in range(world)]
    dist.barrier()
    dist.destroy_process_group()


@WORLDS
def test_every_collective_takes_tensors_on_the_gpu_in_stream_order(world: int) -> None:
    run_ranks(collectives, world, timeout_s=110)


def in_order(member: Member) -> None:
    start(member)
    rank, world = member.rank, member.world
    # Some on the GPU, some on the CPU, all at once: each must match its counterpart on the other ranks.
    tensors = [torch.full((1000 + i,), float(rank + i), device="cuda" if i % 3 else "cpu") for i in range(40)]
    if rank == 0:
        busy(0.2)
    works = [dist.all_reduce(each, async_op=True) for each in tensors]
    for work in reversed(works):
        assert work is not None
        work.wait()
    for i, each in enumerate(tensors):
        assert torch.all(each == sum(peer + i for peer in range(world))), i
    # A call returns at once, whatever the GPU still has to do; and so does waiting for the copy back.
    tensor = torch.ones(100_000, device="cuda")
    dist.barrier()
    busy(0.5)
    begin = time.monotonic()
    work = dist.all_reduce(tensor, async_op=True)
    assert time.monotonic() - begin < 0.3
    assert work is not None and not work.is_completed()
    work.wait()
    assert time.monotonic() - begin > 0.1
    # The results are there for what the stream does next, without further waiting.
    assert float(tensor.sum()) == 100_000 * world
    # A side stream of the caller.
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        other = torch.ones(1000, device="cuda")
        busy()
        other.mul_(rank + 1)
        dist.all_reduce(other)
        total = other.sum()
    side.synchronize()
    assert float(total) == 1000 * world * (world + 1) / 2
    future = dist.all_reduce(torch.full((10,), 2.0, device="cuda"), async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    assert doubled.wait().tolist() == [4.0 * world] * 10
    with dist._coalescing_manager(device=torch.device("cuda")):
        pair = [torch.ones(5, device="cuda"), torch.ones(7, device="cuda")]
        for each in pair:
            dist.all_reduce(each)
    assert [float(each.sum()) for each in pair] == [5.0 * world, 7.0 * world]
    dist.barrier()
    dist.destroy_process_group()


@WORLDS
def test_order_streams_and_futures(world: int) -> None:
    run_ranks(in_order, world, timeout_s=110)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).cuda()


def train(model: nn.Module, rank: int, steps: int = 5) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        torch.manual_seed(100 * step + rank)
        model(torch.randn(8, 64).cuda()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(model: nn.Module) -> list[torch.Tensor]:
    each = [parameter.detach() for parameter in model.parameters()]
    return [one.full_tensor() if isinstance(one, DTensor) else one.clone() for one in each]


def beside_gloo(member: Member, kind: str) -> None:
    torch.use_deterministic_algorithms(True)
    results = []
    for backend in ("storm", "gloo"):
        start(member, backend)
        if kind == "ddp":
            model: nn.Module = DistributedDataParallel(network(), bucket_cap_mb=0.02)
        else:
            model = fully_shard(network(), mesh=dist.init_device_mesh("cuda", (member.world,)))
        train(model, member.rank)
        # Shards as they are: gathering them crashes on gloo in torch 2.11.
        each = [parameter.detach() for parameter in model.parameters()]
        results.append([one.to_local() if isinstance(one, DTensor) else one for one in each])
        dist.barrier()
        dist.destroy_process_group()
    for ours, theirs in zip(*results, strict=True):
        # With two ranks, there is one order of summation.
        assert torch.equal(ours, theirs) if member.world == 2 else torch.allclose(ours, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("kind", "world"), [("ddp", 2), ("ddp", 4), ("fsdp2", 2)])
def test_training_gives_what_it_gives_on_gloo(kind: str, world: int) -> None:
    run_ranks(beside_gloo, world, (kind,), timeout_s=110)


def lossy(member: Member, kind: str, wire: torch.dtype) -> tuple[list[float], float]:
    options: Any = stormtorch.Options(datagram_bytes=512)
    start(member, pg_options=options)
    state = stormtorch.LossyGradients(wire=wire)
    if kind == "ddp":
        model: Any = DistributedDataParallel(network(), bucket_cap_mb=0.02)
        model.register_comm_hook(state, stormtorch.lossy_hook)
    else:
        model = fully_shard(network(), mesh=dist.init_device_mesh("cuda", (member.world,)))
        stormtorch.lossy_reduce_scatter(model, state)
    with stormtorch.faults(loss=0.1, seed=member.rank):
        train(model, member.rank, 20)
        found = [float(each.double().sum()) for each in weights(model)]
        dist.barrier()
    dist.destroy_process_group()
    return found, state.arrived


@pytest.mark.parametrize(
    ("kind", "wire"), list(itertools.product(["ddp", "fsdp2"], [torch.float32, torch.bfloat16, torch.int8, torch.int4]))
)
def test_lossy_gradients_keep_replicas_identical(kind: str, wire: torch.dtype) -> None:
    results = run_ranks(lossy, 2, (kind, wire), timeout_s=110)
    assert results[0][0] == results[1][0]
    assert all(0.8 < arrived < 0.97 for _, arrived in results)

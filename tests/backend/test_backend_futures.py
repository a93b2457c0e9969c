"""Futures of the backend's works: what they hold is what gloo's hold, for Python and for torch's C++."""
# mypy: disable-error-code="no-untyped-call"

import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stormtorch_lab.jobs.ranks import Member, run_ranks

gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
Call = Callable[[], Any]


def start(member: Member, **settings: Any) -> Any:
    """Joins the job and returns a group on gloo to compare with."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # some of the calls are deprecated, and still there
    dist.init_process_group("storm", store=member.store, rank=member.rank, world_size=member.world, **settings)
    return dist.new_group(backend="gloo")


def gradients(member: Member, hook: Any, group: Any) -> list[torch.Tensor]:
    """Of three steps under DDP, with several buckets."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 3))
    model = DistributedDataParallel(layers, process_group=group, bucket_cap_mb=0.002)
    model._register_builtin_comm_hook(hook)
    torch.manual_seed(member.rank)
    for _ in range(3):
        model(torch.randn(8, 20)).square().mean().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def built_in_hooks(member: Member) -> None:
    gloo = start(member, timeout=timedelta(seconds=20))
    for hook in (dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS):  # type: ignore[attr-defined]
        ours, theirs = gradients(member, hook, None), gradients(member, hook, gloo)
        assert len(ours) == 4 and all(map(torch.equal, ours, theirs)), hook
    # Rank 0 alone goes backward: the error comes through C++ and still says whom it waits for.
    short = dist.new_group(timeout=timedelta(seconds=1), backend="storm")
    model = DistributedDataParallel(nn.Linear(4, 4), process_group=short)
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)  # type: ignore[attr-defined]
    loss = model(torch.randn(2, 4)).sum()
    if member.rank == 0:
        with pytest.raises(RuntimeError, match=r"rank 0: all_reduce .*Timed out after 1 s, waiting for rank 1"):
            loss.backward()
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.thorough
def test_built_in_hooks_of_ddp_give_what_they_give_on_gloo() -> None:
    run_ranks(built_in_hooks, 2, timeout_s=60)


def calls(rank: int, world: int, group: Any) -> Iterator[tuple[str, Call]]:
    """Every collective of which gloo has a future, asynchronous."""

    def each(*shape: int) -> list[torch.Tensor]:
        return [torch.ones(*shape) for _ in range(world)]

    def at_root(*shape: int) -> list[torch.Tensor] | None:
        return each(*shape) if rank == 0 else None

    one, how = torch.ones, {"group": group, "async_op": True}
    yield "all_reduce", lambda: dist.all_reduce(one(3, 2), **how)
    yield "all_reduce of nothing", lambda: dist.all_reduce(one(0), **how)
    yield "all_reduce of a sparse one", lambda: dist.all_reduce(torch.eye(3).to_sparse(), **how)
    yield "all_reduce_coalesced", lambda: dist.all_reduce_coalesced([one(3), one(4)], **how)
    yield "reduce", lambda: dist.reduce(one(3, 2), 0, **how)
    yield "broadcast", lambda: dist.broadcast(one(3, 2), 0, **how)
    yield "all_gather", lambda: dist.all_gather(each(3, 2), one(3, 2), **how)
    yield "all_gather_coalesced", lambda: dist.all_gather_coalesced([[one(3), one(4)]] * world, [one(3), one(4)], **how)
    yield "gather", lambda: dist.gather(one(3), at_root(3), 0, **how)
    yield "scatter", lambda: dist.scatter(one(3), at_root(3), 0, **how)
    yield "all_to_all", lambda: dist.all_to_all(each(4), each(4), **how)
    yield "all_to_all_single", lambda: dist.all_to_all_single(one(world, 2), one(world, 2), **how)
    yield "barrier", lambda: dist.barrier(**how)


def held(begun: Any) -> Any:
    """What a future holds, of tensors only their shapes and types."""

    def look(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.dtype, value.layout, tuple(value.shape)
        return type(value), [look(each) for each in value]

    future = begun if isinstance(begun, torch._C.Future) else begun.get_future()
    return look(future.wait())


def what_futures_hold(member: Member) -> None:
    gloo = start(member)
    rank, world = member.rank, member.world
    ours, theirs = dict(calls(rank, world, None)), dict(calls(rank, world, gloo))
    for name in ours:
        assert held(ours[name]()) == held(theirs[name]()), (rank, name)
    # Into one tensor: gloo has a future of pieces of it, NCCL of the tensor itself, as we have.
    single = torch.zeros(3 * world)
    work: Any = gather_single(single, torch.ones(3), async_op=True)
    assert [each is single for each in work.get_future().wait()] == [True]
    # gloo has none of these.
    part = torch.zeros(3)
    scattered: Any = dist.reduce_scatter(part, [torch.ones(3)] * world, async_op=True)
    assert [each is part for each in scattered.get_future().wait()] == [True]
    token = torch.ones(2)
    passed: Any = dist.isend(token, (rank + 1) % world)
    came: Any = dist.irecv(torch.empty(2), (rank - 1) % world)
    assert passed.get_future().wait()[0] is token and came.get_future().wait()[0].equal(token)
    dist.destroy_process_group()


def test_futures_of_all_collectives_hold_what_gloos_hold() -> None:
    run_ranks(what_futures_hold, 3, timeout_s=60)

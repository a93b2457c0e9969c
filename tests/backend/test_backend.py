"""The backend "storm" of torch.distributed, in real processes, beside gloo."""

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import stormtorch
from stormtorch_lab.jobs.failed import RankFailed
from stormtorch_lab.jobs.ranks import Member, run_ranks

# The newer names, where torch has them.
gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.int64, torch.uint8]


def start(member: Member, **settings: Any) -> Any:
    """Joins the job and returns a group on gloo to compare with."""
    torch.set_num_threads(1)
    dist.init_process_group("storm", store=member.store, rank=member.rank, world_size=member.world, **settings)
    return dist.new_group(backend="gloo")


def data(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small whole numbers, whose sums and products are exact in every type and order."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-2, 3, shape, generator=generator).to(dtype)


def both(member: Member, gloo: Any, call: Callable[[Any], Any]) -> None:
    """Runs a call on both groups; it returns tensors, which must be equal."""
    ours, theirs = call(None), call(gloo)
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other), (member.rank, one, other)


def collectives_job(member: Member) -> None:
    gloo = start(member)
    rank, world = member.rank, member.world

    for dtype in DTYPES:
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):

            def reduced(group: Any, op: Any = op, dtype: torch.dtype = dtype) -> list[torch.Tensor]:
                tensor = data(rank, 1000, dtype=dtype)
                dist.all_reduce(tensor, op, group=group)
                rooted = data(rank, 77, dtype=dtype)
                dist.reduce(rooted, 1, op, group=group)
                return [tensor, rooted] if rank == 1 else [tensor]

            both(member, gloo, reduced)

        def moved(group: Any, dtype: torch.dtype = dtype) -> list[torch.Tensor]:
            given = data(rank, 5, 3, dtype=dtype)
            gathered = [torch.zeros_like(given) for _ in range(world)]
            dist.all_gather(gathered, given, group=group)
            single = torch.zeros(world * 5, 3, dtype=dtype)
            gather_single(single, given, group=group)
            shared = data(rank, 9, dtype=dtype)
            dist.broadcast(shared, 1, group=group)
            rooted = [torch.zeros_like(given) for _ in range(world)] if rank == 0 else None
            dist.gather(given, rooted, 0, group=group)
            part = torch.zeros(4, dtype=dtype)
            dist.scatter(
                part, [data(9 + k, 4, dtype=dtype) for k in range(world)] if rank == 0 else None, 0, group=group
            )
            outs = torch.zeros(world * 2, dtype=dtype)
            dist.all_to_all_single(outs, data(rank, world * 2, dtype=dtype), group=group)
            return [*gathered, single, shared, *(rooted or []), part, outs]

        both(member, gloo, moved)

    def uneven(group: Any) -> list[torch.Tensor]:
        out = torch.zeros(sum(rank + 1 for _ in range(world)), 2)
        splits = [peer + 1 for peer in range(world)]
        dist.all_to_all_single(out, data(rank, sum(splits), 2), [rank + 1] * world, splits, group=group)
        return [out]

    both(member, gloo, uneven)

    # Not contiguous, and empty.
    wide = data(rank, 6, 4)
    dist.all_reduce(wide.t()[1:])
    expected = sum(data(peer, 6, 4) for peer in range(world))
    torch.testing.assert_close(wide.t()[1:], expected.t()[1:])  # type: ignore[union-attr]
    assert torch.equal(wide.t()[0], data(rank, 6, 4).t()[0])
    empty = torch.zeros(0)
    dist.all_reduce(empty)
    average = data(rank, 10)
    dist.all_reduce(average, dist.ReduceOp.AVG)
    torch.testing.assert_close(average, sum(data(peer, 10) for peer in range(world)) / world)

    scattered = torch.zeros(3)
    reduce_scatter_single(scattered, data(rank, 3 * world))
    whole = sum(data(peer, 3 * world) for peer in range(world))
    torch.testing.assert_close(scattered, whole[3 * rank : 3 * rank + 3])  # type: ignore[index]

    # Objects, point to point, any source, several at once, futures.
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": peer} for peer in range(world)]
    following, preceding = (rank + 1) % world, (rank - 1) % world
    got = torch.zeros(3)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, torch.full((3,), float(rank)), following), dist.P2POp(dist.irecv, got, preceding)]
    )
    for work in works:
        work.wait()
    assert torch.equal(got, torch.full((3,), float(preceding)))
    if rank == 0:
        sources = [dist.recv(got) for _ in range(world - 1)]
        assert sorted(sources) == list(range(1, world))
    else:
        dist.send(torch.full((3,), float(rank)), 0)
    handles = [dist.all_reduce(torch.ones(10_000), async_op=True) for _ in range(8)]
    future = handles[3].get_future().then(lambda done: done.value()[0].sum())
    assert future.wait() == 10_000 * world
    for handle in handles:
        handle.wait()
        assert handle.is_completed()
    dist.barrier()

    # Groups of some ranks, and both at the same time.
    half = dist.new_group([0, world - 1])
    tensor = torch.ones(5)
    if rank in (0, world - 1):
        dist.all_reduce(tensor, group=half)
        assert torch.equal(tensor, torch.full((5,), 2.0))
    assert dist.get_backend() == "storm"

    def sparse(group: Any) -> list[torch.Tensor]:
        tensor = (data(rank, 6, 2) * (data(rank + 50, 6, 2) > 0)).to_sparse(1)
        dist.all_reduce(tensor, group=group)
        return [tensor.to_dense()]

    both(member, gloo, sparse)
    with pytest.raises(RuntimeError, match="not supported"):
        dist.all_reduce(torch.ones(3).to_sparse(), dist.ReduceOp.MAX)
    dist.destroy_process_group()


@pytest.mark.thorough
@pytest.mark.parametrize("world", [2, 4])
def test_every_collective_gives_what_gloo_gives(world: int) -> None:
    run_ranks(collectives_job, world, (), timeout_s=120)


def ddp_job(member: Member, steps: int) -> list[float]:
    gloo = start(member)

    def trained(group: Any) -> list[torch.Tensor]:
        torch.manual_seed(member.rank)
        model = DistributedDataParallel(
            nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 3)), process_group=group, bucket_cap_mb=0.002
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        for _ in range(steps):
            loss = model(torch.randn(8, 20)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(each.isfinite().all() for each in model.parameters())
        return list(model.parameters())

    both(member, gloo, trained)
    dist.destroy_process_group()
    # A second time in the same process, over the same store.
    dist.init_process_group("storm", store=member.store, rank=member.rank, world_size=member.world)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor.tolist()


def test_ddp_trains_bit_for_bit_as_on_gloo_and_a_second_group_can_be_made() -> None:
    assert run_ranks(ddp_job, 2, (5,), timeout_s=120) == [[2.0] * 3] * 2


def late_job(member: Member, folder: str) -> str:
    os.environ["STORM_FLIGHT_DIR"] = folder
    dist.init_process_group("storm", store=member.store, rank=member.rank, world_size=member.world)
    group: Any = dist.distributed_c10d._get_default_group()
    text = ""
    if member.rank == 0:
        dist.all_reduce(torch.ones(3), async_op=True)
        try:
            group.monitored_barrier(timedelta(seconds=1), wait_all_ranks=True)
        except stormtorch.StormError as error:
            text = str(error)
        handle = dist.barrier(async_op=True)
        group.set_timeout(timedelta(seconds=1))
        with pytest.raises(stormtorch.StormError, match="rank 0: barrier"):
            dist.barrier()
        del handle
        member.report("late")
    else:
        import time

        time.sleep(3)
    group.abort()
    return text


@pytest.mark.thorough
def test_missing_ranks_are_named_and_the_last_operations_are_written_down(tmp_path: Path) -> None:
    texts = run_ranks(late_job, 3, (str(tmp_path),), timeout_s=60, on_message=lambda _rank, _what: None)
    assert "Ranks 1, 2 failed to pass monitoredBarrier in 1000 ms" in texts[0]
    records = list(tmp_path.glob("storm-flight-*-rank0-*.json"))
    assert len(records) == 1
    assert '"operation": "barrier"' in records[0].read_text()


def one_missing_job(member: Member) -> str:
    dist.init_process_group("storm", store=member.store, rank=member.rank, world_size=member.world)
    group: Any = dist.distributed_c10d._get_default_group()
    group.monitored_barrier(timedelta(seconds=20))
    text = ""
    if member.rank != 2:
        try:
            group.monitored_barrier(timedelta(seconds=1))
        except stormtorch.StormError as error:
            text = str(error)
        member.store.set(f"over/{member.rank}", "1")
    member.store.get("over/0")
    member.store.get("over/1")
    dist.destroy_process_group()
    return text


@pytest.mark.thorough
def test_monitored_barrier_names_the_one_rank_that_does_not_come() -> None:
    texts = run_ranks(one_missing_job, 3, (), timeout_s=60)
    assert texts[0] == "[Rank 0]: Rank 2 failed to pass monitoredBarrier in 1000 ms"
    # It arrived late, and raises the error.
    assert (
        texts[1].startswith("[Rank 1]: Rank 1 successfully reached monitoredBarrier") and "rank 1: receive" in texts[1]
    )


def options_job(member: Member, what: str) -> None:
    options: Any = {
        "key": stormtorch.Options(key=b"0123456789abcdef"),
        "variable": None if member.rank else stormtorch.Options(key=b"0123456789abcdef"),
        "wrong": object(),
    }[what]
    if what == "variable":
        os.environ["STORM_KEY"] = "0123456789abcdef"
    dist.init_process_group("storm", store=member.store, rank=member.rank, world_size=member.world, pg_options=options)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((3,), 2.0))
    dist.destroy_process_group()


@pytest.mark.thorough
def test_options_are_given_and_checked() -> None:
    run_ranks(options_job, 2, ("key",), timeout_s=60)
    run_ranks(options_job, 2, ("variable",), timeout_s=60)
    with pytest.raises(RankFailed, match=r"stormtorch\.Options"):
        run_ranks(options_job, 2, ("wrong",), timeout_s=60)


def one_does_not_come(member: Member, how: str) -> str:
    if member.rank == 1 and how == "dies":
        return ""
    options: Any = object() if member.rank == 1 else None
    seconds = 1.0 if how == "dies" else 30.0
    try:
        dist.init_process_group(
            "storm",
            store=member.store,
            rank=member.rank,
            world_size=member.world,
            pg_options=options,
            timeout=timedelta(seconds=seconds),
        )
    except (stormtorch.StormError, TypeError) as error:
        return str(error)
    raise AssertionError("the group was made without rank 1")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("dies", "rank 0: connecting: rank 1 of 2 has not joined within 1 s"),
        ("raises", "rank 0: connecting: rank 1 could not join the job: TypeError: pg_options must be"),
    ],
)
def test_rank_that_does_not_come_to_init_process_group_is_named(how: str, told: str) -> None:
    assert told in run_ranks(one_does_not_come, 2, (how,), timeout_s=25)[0]

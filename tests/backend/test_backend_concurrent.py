"""Many collectives in flight at once: on several groups, from several threads, and under computation."""

import math
import os
import random
import threading
import time
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
from stormtorch_lab.jobs.ranks import Member, run_ranks

pytestmark = pytest.mark.alone

reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

Check = Callable[[], None]
StartedWork = tuple[Any, Check]
"""A collective under way, and what is to hold when it has ended."""


def begin(kind: int, index: int, group: Any, ranks: list[int], rank: int) -> StartedWork:
    """Starts the index-th collective of a group. Every rank's numbers follow from its rank and the index."""
    size, me = len(ranks), ranks.index(rank)
    count = [1, 7, 1000, 20_000, 100_000][index % 5] * size

    def given(peer: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((count,), ranks[peer] + index % 11, dtype=dtype)

    def all_given(dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.stack([given(peer, dtype) for peer in range(size)])

    def holds(out: torch.Tensor, goal: torch.Tensor) -> Check:
        def check() -> None:
            assert out.equal(goal), (rank, kind, index, ranks, out[:3], goal[:3])

        return check

    if kind == 0:
        out = given(me)
        work = dist.all_reduce(out, group=group, async_op=True)
        return work, holds(out, all_given().sum(0))
    if kind == 1:  # torch reduces these, in two exchanges
        out = given(me, torch.int64)
        work = dist.all_reduce(out, dist.ReduceOp.MAX, group=group, async_op=True)
        return work, holds(out, all_given(torch.int64).amax(0))
    if kind == 2:
        out, root = given(me), index % size
        work = dist.broadcast(out, ranks[root], group=group, async_op=True)
        return work, holds(out, given(root))
    if kind == 3:
        outs = [torch.zeros(count) for _ in range(size)]
        work = dist.all_gather(outs, given(me), group=group, async_op=True)
        return work, lambda: holds(torch.stack(outs), all_given())()
    if kind == 4:
        out = torch.zeros(count // size)
        work = reduce_scatter_single(out, given(me), group=group, async_op=True)
        return work, holds(out, all_given().sum(0).chunk(size)[me])
    out = torch.zeros(count)
    work = dist.all_to_all_single(out, given(me), group=group, async_op=True)
    return work, holds(out, torch.cat([given(peer).chunk(size)[me] for peer in range(size)]))


def many(group: Any, ranks: list[int], rank: int, count: int) -> None:
    """Starts many collectives in the same order everywhere, and waits for them in an order of this rank's own."""
    works = [begin(index % 6, index, group, ranks, rank) for index in range(count)]
    random.Random(100 * rank + ranks[0]).shuffle(works)
    for number, (work, check) in enumerate(works):
        if number % 5 == 0:
            work.get_future().wait()
        elif number % 5 == 1:
            while not work.is_completed():
                time.sleep(0.001)
        work.wait()
        check()


def short_wait(member: Member) -> None:
    """A wait that is too short ends by itself, and the collective goes on, also where a thread drives it."""
    for dtype in (torch.float32, torch.int64):
        tensor = torch.ones(200_000, dtype=dtype)
        if member.rank == 0:
            work = dist.all_reduce(tensor, async_op=True)
            assert work is not None
            with pytest.raises(stormtorch.StormError):
                work.wait(timedelta(seconds=0.1))
            member.store.set(f"waited/{dtype}", "")
            work.wait()
        else:
            member.store.get(f"waited/{dtype}")
            dist.all_reduce(tensor)
        assert tensor.eq(member.world).all()


def groups_job(member: Member) -> None:
    dist.init_process_group(
        "storm",
        store=member.store,
        rank=member.rank,
        world_size=member.world,
        timeout=timedelta(seconds=30),
    )
    short_wait(member)
    world = list(range(member.world))
    lists = [world, world[::2], world[1::2], world[:2], world[2:], world]
    groups = [(dist.new_group(ranks), ranks) for ranks in lists]
    mine = [(group, ranks) for group, ranks in groups if member.rank in ranks]
    errors: list[BaseException] = []

    def body(group: Any, ranks: list[int]) -> None:
        try:
            many(group, ranks, member.rank, 50)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=each, daemon=True) for each in mine]
    for thread in threads:
        thread.start()
    give_up_at = time.monotonic() + 60
    for thread in threads:
        thread.join(max(give_up_at - time.monotonic(), 0))
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.thorough
def test_fifty_collectives_on_each_of_several_groups_in_any_order_of_waiting() -> None:
    run_ranks(groups_job, 4, timeout_s=120)


def anybody_job(member: Member, folder: str) -> list[int]:
    """Every rank receives from any source before any rank sends, and from a named rank too."""
    os.environ["STORM_FLIGHT_DIR"] = folder
    dist.init_process_group(
        "storm", store=member.store, rank=member.rank, world_size=member.world, timeout=timedelta(seconds=20)
    )
    rank, world = member.rank, member.world
    following, preceding = (rank + 1) % world, (rank - 1) % world
    outs = [torch.zeros(2) for _ in range(world)]
    works: list[Any] = [dist.irecv(out, tag=5) for out in outs[:2]]
    works.append(dist.irecv(outs[2], preceding, tag=5))
    assert not any(work.is_completed() for work in works)
    assert works[0]._source_rank() == -1
    dist.barrier()
    # Two messages to the next rank, one to every other.
    sent = [dist.isend(torch.tensor([float(rank), 1.0]), peer, tag=5) for peer in range(world) if peer != rank]
    sent.append(dist.isend(torch.tensor([float(rank), 2.0]), following, tag=5))
    for work in sent:
        assert work is not None
        work.wait()
    for work in reversed(works):
        work.wait()
    assert [int(out[0]) for out in outs] == [work._source_rank() for work in works]
    dist.barrier()
    group: Any = dist.distributed_c10d._get_default_group()
    group.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(stormtorch.StormError, match=f"rank {rank}: recv: no rank sent with tag 6 for 0.2 s"):
        dist.recv(torch.zeros(1), tag=6)
    group.set_timeout(timedelta(seconds=20))
    dist.barrier()
    dist.destroy_process_group()
    return sorted(int(10 * out[0] + out[1]) for out in outs)


@pytest.mark.thorough
def test_receives_from_anybody_do_not_block_and_keep_each_senders_order(tmp_path: Path) -> None:
    assert run_ranks(anybody_job, 3, (str(tmp_path),), timeout_s=60) == [[11, 21, 22], [1, 2, 21], [1, 11, 12]]


class Slow(torch.autograd.Function):
    """The identity, whose gradient takes its time and is noted."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, seconds: float, ended: list[float]) -> torch.Tensor:
        ctx.seconds, ctx.ended = seconds, ended
        return given.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.seconds)
        ctx.ended.append(time.time())
        return gradient, None, None


class Layers(nn.Module):
    """Computes slowly between its layers, on the way back."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(300, 300, bias=False) for _ in range(4))
        self.seconds = seconds
        self.ended: list[float] = []

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            given = Slow.apply(layer(given), self.seconds, self.ended)  # type: ignore[no-untyped-call]
        return given


def overlap_job(member: Member) -> dict[str, float]:
    # Each of two ranks sends as much as the tensor has: 2 MB in 0.4 s.
    options: Any = stormtorch.Options(rate="40mbit", interface="127.0.0.1")
    dist.init_process_group("storm", store=member.store, rank=member.rank, world_size=member.world, pg_options=options)
    group: Any = dist.distributed_c10d._get_default_group()
    seconds: dict[str, float] = {}

    def timed(name: str, call: Callable[[], None]) -> None:
        dist.barrier()
        begin = time.monotonic()
        call()
        seconds[name] = min(time.monotonic() - begin, seconds.get(name, math.inf))

    tensor = torch.ones(500_000)

    def both() -> None:
        work = dist.all_reduce(tensor, async_op=True)
        time.sleep(0.4)
        assert work is not None
        work.wait()

    def alone() -> None:
        dist.all_reduce(tensor)

    # The best of three, as a busy machine delays either. One after the other takes 0.4 s more, always.
    for _ in range(3):
        timed("alone", alone)
        timed("both", both)

    model = Layers(0.15)
    parallel = DistributedDataParallel(model, bucket_cap_mb=0.3)  # a layer a bucket
    for _ in range(2):  # the first step finds the order of the buckets
        model.ended.clear()
        before = len(group.flight_recorder.records())
        parallel(torch.ones(2, 300)).sum().backward()
    begun = [each["started"] for each in group.flight_recorder.records()[before:] if each["operation"] == "all_reduce"]
    seconds["buckets"] = len(begun)
    seconds["lead"] = model.ended[-1] - begun[0]
    dist.barrier()
    dist.destroy_process_group()
    return seconds


@pytest.mark.thorough
def test_communication_goes_on_under_computation_and_begins_before_backward_ends() -> None:
    for seconds in run_ranks(overlap_job, 2, timeout_s=60):
        assert seconds["alone"] > 0.25, seconds
        assert seconds["both"] < seconds["alone"] + 0.4 - 0.2, seconds
        # The last layer's bucket leaves while the other three layers' gradients are still being made.
        assert seconds["buckets"] == 4 and seconds["lead"] > 0.25, seconds

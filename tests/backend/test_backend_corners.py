"""Uses of the backend that are rare, and were wrong once."""
# mypy: disable-error-code="attr-defined, union-attr, no-untyped-call"

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import stormtorch
from stormtorch_lab.jobs.ranks import Member, run_ranks


def start(member: Member, backend: str = "storm", seconds: float = 20.0, **settings: Any) -> None:
    torch.set_num_threads(1)
    store = dist.PrefixStore(backend, member.store)
    timeout = timedelta(seconds=seconds)
    dist.init_process_group(
        backend, store=store, rank=member.rank, world_size=member.world, timeout=timeout, **settings
    )


def meet(member: Member, where: str) -> None:
    """A barrier in the store, which no time-out of a group ends."""
    member.store.add(where, 1)
    while member.store.add(where, 0) < member.world:
        time.sleep(0.02)


def in_inference_mode(member: Member) -> None:
    """Background threads of a collective do not inherit the caller's inference mode."""
    with torch.inference_mode():
        for dtype in (torch.int64, torch.float32):
            tensor = torch.full((300_000,), member.rank + 1, dtype=dtype)
            dist.all_reduce(tensor)
            assert int(tensor[-1]) == 6
        wide = torch.ones(4, 3, dtype=torch.float64).t()
        assert dist.all_reduce(wide, async_op=True).get_future().wait()[0].sum() == 36


def receives_of_every_kind(member: Member) -> None:
    rank = member.rank
    # An unused receive from any source takes the next message of that rank, of any type.
    if rank == 0:
        first = torch.empty(4)
        assert dist.recv(first) == 2 and first.tolist() == [2.0] * 4
        dist.barrier()
        second = torch.empty(2, 2, dtype=torch.int32)
        dist.recv(second, 1)
        assert second.tolist() == [[1, 2], [3, 4]]
    else:
        if rank == 2:
            dist.send(torch.full((4,), 2.0), 0)
        dist.barrier()
        if rank == 1:
            dist.send(torch.tensor([1, 2, 3, 4], dtype=torch.int32), 0)
    dist.barrier()
    # Two at once, both from the same rank, above the eager limit.
    if rank == 0:
        both = [torch.empty(2_000_000) for _ in range(2)]
        works = [dist.irecv(each, tag=1) for each in both]
        dist.barrier()
        for work in works:
            work.wait()
        assert [float(each[-1]) for each in both] == [10.0, 11.0]
    else:
        for value in (10.0, 11.0):
            if rank == 1:
                dist.send(torch.full((2_000_000,), value), 0, tag=1)
        dist.barrier()
    # Many from anybody, completed by threads of their own.
    if rank == 0:
        got = [torch.empty(1) for _ in range(40)]
        futures = [dist.irecv(each, tag=2).get_future() for each in got]
        for future in futures:
            future.wait()
        assert sorted(int(each) for each in got) == sorted([*range(100, 120), *range(200, 220)])
    else:
        for i in range(20):
            dist.send(torch.tensor([float(100 * rank + i)]), 0, tag=2)
    dist.barrier()


def waiting_for_several_at_once(member: Member) -> None:
    if member.rank == 0:
        out = torch.empty(5)
        with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as block:
            dist.irecv(out, 1, tag=3)
        begin = time.monotonic()
        assert not block.works[0].is_completed()
        with pytest.raises(stormtorch.StormError):
            block.works[0].wait(timedelta(seconds=0.2))
        assert time.monotonic() - begin < 10.0  # not until the message comes, which waits for the barrier
        dist.barrier()
        block.works[0].wait()
        assert out.tolist() == [1.0] * 5
    else:
        dist.barrier()
        if member.rank == 1:
            dist.send(torch.ones(5), 0, tag=3)
    dist.barrier()


def all_corners(member: Member) -> None:
    start(member)
    in_inference_mode(member)
    receives_of_every_kind(member)
    waiting_for_several_at_once(member)
    dist.destroy_process_group()


def test_inference_mode_receives_from_anybody_and_coalesced_waits() -> None:
    run_ranks(all_corners, 3, timeout_s=100)


def too_late(member: Member) -> None:
    start(member, seconds=1.0)
    if member.rank == 0:
        work: Any = dist.all_reduce(torch.ones(10), async_op=True)
        with pytest.raises(stormtorch.StormError, match="Timed out after 1 s"):
            work.wait(timedelta(seconds=10))
        # It has ended, and says how.
        assert "Timed out" in str(work.exception()) and work.is_completed() and not work.is_success()
    meet(member, "late")
    dist.distributed_c10d._get_default_group().abort()


@pytest.mark.thorough
def test_time_out_of_the_collective_is_its_end_however_long_one_waits() -> None:
    run_ranks(too_late, 2, timeout_s=60)


def shorter_one(member: Member, options_s: float, torch_s: float) -> None:
    """Rank 0 waits for what rank 1 does not do, in every way that has a time-out; each takes the shorter one."""
    meet(member, "begin")  # so that no rank waits long in what follows
    start(member, seconds=torch_s, pg_options=stormtorch.Options(timeout_s=options_s))
    long = timedelta(seconds=max(options_s, torch_s))
    short_s = min(options_s, torch_s)
    groups = [dist.distributed_c10d._get_default_group()]
    if options_s < torch_s:  # otherwise nothing is left that is short
        groups += [dist.new_group(timeout=long), dist.new_group(timeout=long)]
        groups[2].set_timeout(long)
    if member.rank == 0:
        for group in groups:
            calls = [
                lambda group=group: dist.all_reduce(torch.ones(3), group=group),
                lambda group=group: dist.recv(torch.ones(3), 1, group=group),
                lambda group=group: dist.recv(torch.ones(3), group=group, tag=5),
                lambda group=group: dist.broadcast(torch.ones(3), 1, group=group, async_op=True).wait(long),
                lambda group=group: group.monitored_barrier(long if options_s < torch_s else None),
            ]
            for number, call in enumerate(calls):
                began = time.monotonic()
                with pytest.raises(stormtorch.StormError):
                    call()
                assert short_s - 0.05 <= time.monotonic() - began < short_s + 20.0, (number, group)
    meet(member, "over")
    groups[0].abort()


@pytest.mark.thorough
@pytest.mark.parametrize(("options_s", "torch_s"), [(0.3, 60.0), (60.0, 0.3)])
def test_of_the_options_time_out_and_torchs_the_shorter_one_holds(options_s: float, torch_s: float) -> None:
    run_ranks(shorter_one, 2, (options_s, torch_s), timeout_s=60)


def beside_gloo(member: Member) -> None:
    start(member, "gloo")
    groups = [(ranks, dist.new_group(ranks, backend="storm")) for ranks in ([1, 2], [0, 1])]
    for ranks, group in groups:
        if member.rank in ranks:
            tensor = torch.tensor([float(member.rank)])
            dist.all_reduce(tensor, group=group)
            assert float(tensor) == sum(ranks)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.thorough
def test_groups_of_storm_beside_a_default_of_gloo_know_their_own_ranks() -> None:
    run_ranks(beside_gloo, 3, timeout_s=60)

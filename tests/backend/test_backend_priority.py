"""Groups of low priority through torch.distributed: they share the job's sockets, and have a marked one."""
# mypy: disable-error-code="attr-defined, union-attr, no-untyped-call"

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import stormtorch
from stormtorch.backend.creation import PRIORITY_VARIABLE, _checked
from stormtorch_lab.jobs.ranks import Member, run_ranks


def groups_of_both_priorities(member: Member) -> list[Any]:
    torch.set_num_threads(1)
    dist.init_process_group(
        "storm",
        store=member.store,
        rank=member.rank,
        world_size=member.world,
        timeout=timedelta(seconds=20),
        pg_options=stormtorch.Options(priority="both", shared_memory=False),
    )
    world = dist.distributed_c10d._get_default_group().group
    low = dist.new_group(backend="storm", pg_options=stormtorch.Options(priority="low"))
    apart = dist.new_group(backend="storm", pg_options=stormtorch.Options(priority="low", timeout_s=9.0))
    before = world.transport.lane_bytes_sent()
    tensor = torch.full((200_000,), member.rank + 1.0)
    dist.all_reduce(tensor, group=low)
    after = world.transport.lane_bytes_sent()
    shares = low.group.transport is world.transport, apart.group.transport is world.transport
    dist.destroy_process_group()
    return [float(tensor[7]), shares, after[0] - before[0] < 10_000, after[1] - before[1] > 400_000]


def test_group_that_asks_for_low_priority_alone_shares_the_jobs_transport() -> None:
    for found in run_ranks(groups_of_both_priorities, 2, (), timeout_s=60.0):
        assert found == [3.0, (True, False), True, True]


def test_environment_chooses_the_priority_of_jobs_without_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PRIORITY_VARIABLE, "low")
    assert _checked(None, 5.0).priority == "low"
    assert _checked(stormtorch.Options(priority="both"), 5.0).priority == "both"
    monkeypatch.setenv(PRIORITY_VARIABLE, "urgent")
    with pytest.raises(ValueError, match="STORM_PRIORITY must be normal, low or both, got 'urgent'"):
        _checked(None, 5.0)

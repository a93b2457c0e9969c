"""Groups of torch's gloo, called directly: barriers and votes of a job, and a peer in benchmarks."""

import os
from datetime import timedelta
from typing import Protocol, cast

import torch
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Work

from stormtorch_lab.jobs.ranks import Member


class GlooGroup(Protocol):
    """Methods of ProcessGroupGloo that torch's type stubs leave out."""

    def allreduce(self, tensors: list[torch.Tensor]) -> Work:
        """Sums in place."""
        ...

    def barrier(self) -> Work:
        """Waits for all ranks."""
        ...


def gloo_group(member: Member, name: str, world: int | None = None, interface: str | None = None) -> GlooGroup:
    """Makes a gloo group of the first `world` ranks; the defaults are all ranks and the measured interface."""
    os.environ["GLOO_SOCKET_IFNAME"] = interface or member.interface
    store = PrefixStore(name, member.store)
    group = ProcessGroupGloo(store, member.rank, world or member.world, timedelta(minutes=10))
    return cast(GlooGroup, group)

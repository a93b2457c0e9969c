"""Hands parameters and buffers to a new process that takes the place of a rank that died."""

from collections.abc import Sequence

import torch

from stormtorch import collectives
from stormtorch.collectives import Group
from stormtorch.errors import StormError
from stormtorch.reliability import Reliability
from stormtorch.runtime.bucket import Bucket
from stormtorch.runtime.members import Epoch
from stormtorch.runtime.session import Session


@torch.no_grad()
def hand_over(
    session: Session,
    buckets: Sequence[Bucket],
    epoch: Epoch,
    new: Sequence[int],
    reliability: Reliability,
    *,
    whole: bool = False,
) -> None:
    """Gives new processes the root's parameters and buffers.

    Where parameters have owners, the root sends its copies of the shards of new processes and of ranks that are still
    missing. All ranks take them, so that no two copies differ. Otherwise the root sends its whole model, and only the
    new processes take it. Parameters that are not trained, and buffers, come with it.

    Args:
        session: The session of this rank.
        buckets: Buckets that hold its parameters.
        epoch: The epoch that begins.
        new: Ranks that are new processes.
        reliability: Reliability of the exchanges.
        whole: Whether every rank has a model of its own.

    Raises:
        StormError: This is a new process, and it did not get everything.
    """
    # A group of the present ranks only: a dead rank in it would pass nothing on.
    all_ranks, rank = session.group, session.group.rank
    ranks = [all_ranks.ranks[peer] for peer in epoch.members]
    group = Group(all_ranks.transport, ranks, name=f"{session.name}/{epoch.number}/members")
    root = epoch.members.index(epoch.root)
    missing = sorted(set(range(all_ranks.size)) - set(epoch.members))

    def hand(values: torch.Tensor) -> None:
        for arrival in collectives.broadcast(group, values, root, reliability=reliability).wait():
            if rank in new and arrival.arrived < 1.0:
                raise StormError(
                    f"rank {rank}: a rank fell silent while this one was handed what it needs to return: start it again"
                )

    for bucket in buckets if whole else ():
        message = bucket.flat.detach().to("cpu", copy=True)
        hand(message)
        if rank in new:
            bucket.flat.copy_(message)
            bucket.adopt()
    for bucket in () if whole else buckets:
        for peer in (*new, *missing):
            hand(bucket.shard(bucket.host_flat, peer))
        if bucket.on_gpu:
            bucket.flat.copy_(bucket.host_flat)
        if rank in new:
            bucket.adopt()
    homes = {id(parameter) for bucket in buckets for parameter in bucket.parameters}
    for tensor in (*session.model.parameters(), *session.model.buffers()):
        if id(tensor) not in homes and tensor.numel():
            values = tensor.detach().to("cpu", copy=True).contiguous()
            raw = values.view(-1).view(torch.uint8)
            # As float32, whatever the dtype: only floats may be lost, and an exact exchange would end the whole job if
            # a rank died now.
            message = torch.zeros(-(-raw.numel() // 4), dtype=torch.float32, device="cpu")
            message.view(torch.uint8)[: raw.numel()] = raw
            hand(message)
            if rank in new:
                raw.copy_(message.view(torch.uint8)[: raw.numel()])
                tensor.copy_(values)

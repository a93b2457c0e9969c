"""What a new process gets from the others when it takes the place of a rank that died."""

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
    """Gives new processes what the root has.

    Where parameters have owners, these are the shards of the new processes and of ranks that are still missing, as
    others last heard of them: everyone takes the same, so that no two copies differ. Otherwise it is the root's whole
    model, which only the new processes take. What is not trained comes with it.

    Args:
        session: This rank's.
        buckets: Where its parameters are.
        epoch: The epoch that begins.
        new: Ranks that are new processes.
        reliability: Reliability of the exchanges.
        whole: Whether every rank has a model of its own.

    Raises:
        StormError: This is a new process, and did not get all.
    """
    # Of those that are here alone: whoever is dead would pass nothing on.
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
            # Only floats may be lost, and an exact exchange would end the job of all if a rank died now.
            message = torch.zeros(-(-raw.numel() // 4), dtype=torch.float32, device="cpu")
            message.view(torch.uint8)[: raw.numel()] = raw
            hand(message)
            if rank in new:
                raw.copy_(message.view(torch.uint8)[: raw.numel()])
                tensor.copy_(values)

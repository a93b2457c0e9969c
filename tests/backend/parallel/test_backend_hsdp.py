"""HSDP with storm between hosts and another backend inside: the same training as without storm."""
# mypy: disable-error-code="attr-defined, no-untyped-call, method-assign"

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from stormtorch.backend.process_group import StormProcessGroup
from stormtorch.exchange.exchange import Exchange, Plan
from stormtorch_lab.jobs.ranks import Member, run_ranks


def network() -> nn.Sequential:
    torch.manual_seed(0)
    # The first layer's gradients are large enough to be cut into shards of many datagrams.
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 8))


def trained(model: nn.Module, rank: int) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(4):
        torch.manual_seed(100 * step + rank)
        model(torch.randn(4, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = [each.detach() for each in model.parameters()]
    return [each.full_tensor() if isinstance(each, DTensor) else each.clone() for each in whole]


def counted(across: StormProcessGroup) -> list[int]:
    """The bytes of every exchange that the group's transport begins from now on."""
    transport, sent = across.group.transport, list[int]()
    begin = transport.post

    def post(plan: Plan) -> Exchange:
        sent.append(sum(each.bytes for each in plan.sends))
        return begin(plan)

    transport.post = post
    return sent


def hybrid(member: Member, replicate: str) -> list[torch.Tensor]:
    mesh = dist.init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=("replicate", "shard"), backend_override={"replicate": replicate}
    )
    across, inside = mesh["replicate"].get_group(), mesh["shard"].get_group()
    assert (dist.get_backend(across), dist.get_backend(inside)) == (replicate, "gloo")
    sent = counted(across) if isinstance(across, StormProcessGroup) else []
    model = network()
    fully_shard(model, mesh=mesh)
    result = trained(model, member.rank)
    if replicate == "storm":
        # Four steps in which each of two ranks of a host sends its half of the gradients.
        gradients = 4 * sum(each.numel() for each in network().parameters())
        assert 1.0 <= sum(sent) / (4 * gradients / 2) < 1.1
    return result


def job(member: Member) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=member.store, rank=member.rank, world_size=member.world)
    ours, theirs = hybrid(member, "storm"), hybrid(member, "gloo")
    plain = trained(DistributedDataParallel(network()), member.rank)
    for one, other, same in zip(ours, theirs, plain, strict=True):
        assert torch.equal(one, other)
        assert torch.allclose(one, same, rtol=1e-4, atol=1e-6)
        assert not torch.equal(one, torch.zeros_like(one))
    dist.barrier()
    dist.destroy_process_group()


def test_storm_replicates_what_gloo_shards() -> None:
    run_ranks(job, 4, timeout_s=100)

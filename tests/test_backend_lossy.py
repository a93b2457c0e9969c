"""Gradients that may lose packets: replicas stay identical, and training goes on as well as without loss."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but not marked as exported
from torch.nn.parallel import DistributedDataParallel

import stormtorch
from stormtorch.bench.ranks import Member, run_ranks


def train(member: Member, steps: int, loss: float, wire: torch.dtype) -> tuple[float, list[float], float]:
    """The mean loss of the last steps, the replica's parameters summed up, and what arrived."""
    torch.set_num_threads(1)
    # Small datagrams, so that a small model is cut into many.
    options: Any = stormtorch.Options(datagram_bytes=512)
    dist.init_process_group("storm", store=member.store, rank=member.rank, world_size=member.world, pg_options=options)
    torch.manual_seed(0)
    teacher = nn.Linear(32, 8)
    plain = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    model = DistributedDataParallel(plain, bucket_cap_mb=0.005)
    state = stormtorch.LossyGradients(wire=wire)
    model.register_comm_hook(state, stormtorch.lossy_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(1 + member.rank)
    last = []
    with stormtorch.faults(loss=loss, seed=member.rank):
        for step in range(steps):
            inputs = torch.randn(32, 32)
            error = (model(inputs) - teacher(inputs).detach()).square().mean()
            error.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step >= steps - 50:
                last.append(error.item())
        dist.barrier()
    weights = [float(each.double().sum()) for each in model.parameters()]
    dist.destroy_process_group()
    return sum(last) / len(last), weights, state.arrived


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
def test_replicas_stay_identical_and_the_loss_is_that_of_the_exact_run(wire: torch.dtype) -> None:
    lossy = run_ranks(train, 2, (200, 0.1, wire), timeout_s=120)
    exact = run_ranks(train, 2, (200, 0.0, wire), timeout_s=120)
    assert lossy[0][1] == lossy[1][1] and exact[0][1] == exact[1][1]
    assert lossy[0][1] != exact[0][1]
    assert 0.85 < lossy[0][2] < 0.95 and exact[0][2] == 1.0
    errors = [sum(each[0] for each in run) / 2 for run in (lossy, exact)]
    assert errors[0] == pytest.approx(errors[1], rel=0.2)


def test_bad_wire_and_other_backends_are_refused() -> None:
    with pytest.raises(ValueError, match="wire"):
        stormtorch.LossyGradients(wire=torch.int32)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(TypeError, match="storm"):
            stormtorch.LossyGradients().process_group()
    finally:
        dist.destroy_process_group()

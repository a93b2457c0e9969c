"""HSDP: parameters are sharded inside each host by one backend, and replicated across hosts by storm.

Inside a host, gloo (or nccl, for GPUs) gathers parameters and scatters gradients. Only the sums over hosts pass through
the network, and so through storm: of k ranks on a host, each sends 1/k of the gradients. Run it as two hosts of two
ranks that are all on this machine, or on two virtual hosts whose network loses packets:

    torchrun --nproc-per-node 4 examples/hsdp_replicate.py
    stormtorch lab run --hosts 2 --loss 0.1 --management -- torchrun --nproc-per-node 2 examples/hsdp_replicate.py
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

from digits import load, make_model, report


def main() -> None:
    """Trains, and prints the result."""
    dist.init_process_group("gloo")  # "cpu:gloo,cuda:nccl" on GPUs
    world, per_host = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    if per_host == world:  # all on one machine: play two hosts
        per_host = world // 2
    mesh = dist.init_device_mesh(
        "cpu",
        (world // per_host, per_host),
        mesh_dim_names=("replicate", "shard"),
        backend_override={"replicate": "storm"},  # the only line about stormtorch
    )
    print(f"rank {dist.get_rank()}: replicate by {dist.get_backend(mesh['replicate'].get_group())}", flush=True)

    train, test = load()
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=32, sampler=sampler)
    model = make_model(seed=0)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(10):
        sampler.set_epoch(epoch)
        for pictures, labels in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(pictures), labels).backward()
            optimizer.step()

    whole = make_model(seed=0)
    whole.load_state_dict({name: each.full_tensor() for name, each in model.state_dict().items()})
    report(whole, test)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Elastic training: ranks join and leave, and every sample is used once per epoch.

Run it on two processes on this machine. A process that joins them later names any live rank:

    torchrun --nproc-per-node 2 examples/elastic_data.py
    python examples/elastic_data.py --join host:port
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import stormtorch
from digits import load, make_model


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    sampler: stormtorch.ElasticSampler,
    loader: DataLoader,
    epochs: int,
) -> None:
    """Trains until a number of epochs is complete. A rank that joins begins at the present position of the others."""
    while sampler.epoch < epochs:
        for step in sampler.steps(loader):
            for group in optimizer.param_groups:  # all ranks count the job's steps alike, those that join too
                group["lr"] = 3e-3 * min(1.0, (optimizer.session.steps + 1) / 20)
            for pictures, labels in step:  # one batch, or several if ranks are gone and the global batch is constant
                with sampler.accumulate(model):
                    loss = nn.functional.cross_entropy(model(pictures), labels)
                    (loss * sampler.scale).backward()
            optimizer.step()
            optimizer.zero_grad()


def main() -> None:
    """Trains on digits."""
    options = argparse.ArgumentParser(description="Trains on digits while ranks come and go.")
    options.add_argument("--join", metavar="HOST:PORT", help="any live rank of a job to join")
    options.add_argument("--epochs", type=int, default=10)
    options.add_argument("--batch", choices=["per-rank", "constant"], default="constant")
    arguments = options.parse_args()

    if arguments.join:
        group = stormtorch.join(arguments.join)
    else:
        dist.init_process_group("storm")
        group = None
    train_data, test_data = load()
    model = make_model(seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = stormtorch.prepare(model, optimizer, group=group)

    sampler = stormtorch.ElasticSampler(train_data, batch_size=32, batch=arguments.batch)
    sampler.attach(optimizer)
    loader = DataLoader(train_data, batch_sampler=sampler, num_workers=1)
    train(model, optimizer, sampler, loader, arguments.epochs)

    pictures, labels = test_data.tensors
    with stormtorch.exact(model), torch.no_grad():
        accuracy = (model(pictures).argmax(1) == labels).float().mean().item()
    print(f"{optimizer.session.steps} steps, {sampler.epoch} epochs, accuracy {accuracy:.1%}", flush=True)
    if group is None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

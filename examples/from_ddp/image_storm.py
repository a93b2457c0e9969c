"""Trains an image classifier, as most scripts do: a sampler, batch normalisation, an average of weights, validation.

Run it with `torchrun --nproc-per-node 2 examples/from_ddp/image_storm.py`.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from parts import convolutions, pictures
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler

import stormtorch

parser = argparse.ArgumentParser(description="Trains an image classifier.")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--checkpoint", type=Path, help="file to write at the end")
options = parser.parse_args()

dist.init_process_group("storm")
torch.manual_seed(0)
train, held_out = pictures()
sampler = DistributedSampler(train)
loader = DataLoader(train, batch_size=options.batch, sampler=sampler)
validation = DataLoader(held_out, batch_size=64, sampler=DistributedSampler(held_out, shuffle=False))

model = convolutions()
optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, total_steps=options.epochs * len(loader))
model, optimizer = stormtorch.prepare(model, optimizer)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)


def validate(model: torch.nn.Module) -> tuple[float, float]:
    """Returns loss and accuracy over the held-out pictures of all ranks."""
    model.eval()
    totals = torch.zeros(3)
    with torch.no_grad():
        for given, labels in validation:
            scores = model(given)
            loss = torch.nn.functional.cross_entropy(scores, labels, reduction="sum")
            totals += torch.tensor([loss.item(), (scores.argmax(1) == labels).sum().item(), len(labels)])
    dist.all_reduce(totals)
    model.train()
    return (totals[0] / totals[2]).item(), (totals[1] / totals[2]).item()


for epoch in range(options.epochs):
    sampler.set_epoch(epoch)
    for given, labels in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(given), labels, label_smoothing=0.05).backward()
        optimizer.step()
        schedule.step()
        average.update_parameters(model)
    with stormtorch.exact(model):
        loss, accuracy = validate(model)
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {loss:.3f}, accuracy {accuracy:.1%}", flush=True)
_, averaged = validate(average.module)
if dist.get_rank() == 0:
    print(f"average of weights: accuracy {averaged:.1%}", flush=True)
    if options.checkpoint:
        torch.save({"model": model.state_dict(), "average": average.module.state_dict()}, options.checkpoint)
dist.destroy_process_group()

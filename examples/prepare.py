"""Training over a network that loses packets, started by torchrun: one line replaces DDP.

Run it on two processes on this machine, where a tenth of the datagrams is dropped on purpose, or on four virtual hosts
with real packet loss:

    torchrun --nproc-per-node 2 examples/prepare.py --loss 0.1
    stormtorch lab run --hosts 4 --rate 100mbit --loss 0.1 --management -- torchrun examples/prepare.py
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

import stormtorch
from digits import load, make_model, report

options = argparse.ArgumentParser(description="Trains on digits over a network that loses packets.")
options.add_argument("--loss", type=float, default=0.0, help="fraction of the datagrams to drop on purpose")
options.add_argument("--checkpoint", type=Path, help="file to resume from if it exists, and to write at the end")
options.add_argument("--ledger", type=Path, help="file for the ledger: one line of JSON per step")
arguments = options.parse_args()

# Use datagrams of Ethernet's size, so that loss strikes as on a real network: on loopback they would carry 64 KB.
dist.init_process_group("storm", pg_options=stormtorch.Options(datagram_bytes=1472))

train, test = load()
sampler = DistributedSampler(train)
loader = DataLoader(train, batch_size=32, sampler=sampler)
model = make_model(seed=dist.get_rank())
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
model, optimizer = stormtorch.prepare(model, optimizer)  # replaces DistributedDataParallel

if arguments.checkpoint and arguments.checkpoint.exists():
    saved = torch.load(arguments.checkpoint)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
if arguments.ledger and dist.get_rank() == 0:
    optimizer.ledger.follow(arguments.ledger)

with stormtorch.faults(loss=arguments.loss, seed=1):
    for epoch in range(10):
        sampler.set_epoch(epoch)
        for pictures, labels in loader:
            torch.nn.functional.cross_entropy(model(pictures), labels).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # clips by the norm over all ranks
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()

    with stormtorch.exact(model):  # inside, every rank has the same parameters
        report(model, test)

# Every rank takes part in gathering the state; one writes it.
state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
if dist.get_rank() == 0:
    if arguments.checkpoint:
        torch.save(state, arguments.checkpoint + ".new")
        os.replace(arguments.checkpoint + ".new", arguments.checkpoint)  # never half of one in its place
    summary = optimizer.ledger.summary()
    print(f"{summary['steps']} steps, {summary['arrived']:.1%} of the chunks arrived", flush=True)
dist.destroy_process_group()

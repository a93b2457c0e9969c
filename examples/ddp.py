"""DDP, started by torchrun.

Run it on two processes on this machine, or on four virtual hosts whose network loses every tenth packet:

    torchrun --nproc-per-node 2 examples/ddp.py
    stormtorch lab run --hosts 4 --rate 100mbit --loss 0.1 --management -- torchrun examples/ddp.py
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from digits import load, make_model, report

dist.init_process_group("storm")  # the only line about stormtorch

train, test = load()
sampler = DistributedSampler(train)
loader = DataLoader(train, batch_size=32, sampler=sampler)
model = DistributedDataParallel(make_model(seed=dist.get_rank()))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for epoch in range(10):
    sampler.set_epoch(epoch)
    for pictures, labels in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(pictures), labels).backward()
        optimizer.step()

report(model.module, test)
dist.destroy_process_group()

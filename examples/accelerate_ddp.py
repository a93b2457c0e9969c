"""Accelerate on two processes on this machine.

Run it with `torchrun --nproc-per-node 2 examples/accelerate_ddp.py`.
"""

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader

from digits import load, make_model, report

dist.init_process_group("storm")  # before the Accelerator, which then uses this group
accelerator = Accelerator(cpu=True)

train, test = load()
model = make_model(seed=accelerator.process_index)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(train, batch_size=32, shuffle=True))
for _ in range(10):
    for pictures, labels in loader:
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.cross_entropy(model(pictures), labels))
        optimizer.step()

report(accelerator.unwrap_model(model), test)
accelerator.end_training()  # destroys the group

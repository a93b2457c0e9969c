"""Accelerate with prepare(), on two processes on this machine.

Run it with `torchrun --nproc-per-node 2 examples/accelerate_prepare.py`.
"""

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader

import stormtorch
from digits import load, make_model, report
from stormtorch.integrations.accelerate import prepare

dist.init_process_group("storm")  # before the Accelerator, which then uses this group
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)

train, test = load()
model = make_model(seed=accelerator.process_index)
optimizer = torch.optim.Adam(model.parameters(), lr=6e-3)
loader = DataLoader(train, batch_size=16, shuffle=True)
model, optimizer, loader = prepare(accelerator, model, optimizer, loader)  # in place of accelerator.prepare(...)
for _ in range(10):
    for pictures, labels in loader:
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.cross_entropy(model(pictures), labels))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)  # by the norm over all ranks
            optimizer.step()
            optimizer.zero_grad()

with stormtorch.exact(model):
    report(accelerator.unwrap_model(model), test)
accelerator.end_training()  # destroys the group

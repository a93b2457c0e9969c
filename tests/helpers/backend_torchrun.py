"""A script for torchrun: two ranks of which one never comes, until Ctrl-C."""

import time

import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("storm")
try:
    print("blocked", flush=True)
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(10))
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted", flush=True)
dist.destroy_process_group()
print("destroyed", flush=True)

"""A rank of a job in which rank 1 is killed in the middle. The others print what they met, and after how long."""

import os
import signal
import time

import torch
import torch.distributed as dist

import stormtorch

torch.set_num_threads(1)
options = stormtorch.Options(silence_s=2.0)
dist.init_process_group("storm", pg_options=options)
rank = dist.get_rank()
tensor = torch.ones(200_000)
try:
    for step in range(1_000_000):
        if rank == 1 and step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
except stormtorch.StormError as error:
    print(f"{time.monotonic() - begin:.2f} {type(error).__name__} {error}", flush=True)
dist.destroy_process_group()

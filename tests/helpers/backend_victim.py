"""A rank of a job in which rank 1 is killed. The others print errors and their times."""

import json
import os
import signal
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import stormtorch

KILLED_STEP = 4
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
kill_after_s, silence_s = float(os.environ["KILL_AFTER_S"]), float(os.environ["SILENCE_S"])


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def die() -> None:
    say(killed=time.monotonic())
    os.kill(os.getpid(), signal.SIGKILL)


def die_soon(step: int) -> None:
    """In the middle of what comes next: each attempt at another moment."""
    if rank == 1 and step == KILLED_STEP:
        threading.Timer(kill_after_s, die).start()


def in_all_reduce(step: int) -> None:
    die_soon(step)
    dist.all_reduce(torch.ones(5_000_000), dist.ReduceOp.AVG)


def between_collectives(step: int) -> None:
    if step == KILLED_STEP:
        if rank == 1:
            die()
        time.sleep(0.2)
    dist.all_reduce(torch.ones(1000))


def in_barrier(step: int) -> None:
    if rank == 1 and step == KILLED_STEP:
        time.sleep(0.2)  # the others wait in it
        die()
    dist.barrier()


def in_ring(step: int) -> None:
    # Most ranks never talk to rank 1: they wait for one that waits for one that waits for it.
    die_soon(step)
    handle = dist.isend(torch.ones(1_000_000), (rank + 1) % world) if rank == 0 else None
    dist.recv(torch.empty(1_000_000), (rank - 1) % world)
    if handle is None:
        dist.send(torch.ones(1_000_000), (rank + 1) % world)
    else:
        handle.wait()


class InBackward:
    """One step of training; its buckets are reduced while the backward pass goes on."""

    def __init__(self) -> None:
        layers = [nn.Linear(500, 500) for _ in range(4)]
        self.model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=1)

    def __call__(self, step: int) -> None:
        loss = self.model(torch.randn(4, 500)).square().mean()
        die_soon(step)
        loss.backward()


def main(scenario: str) -> None:
    torch.set_num_threads(1)
    port = int(os.environ["STORM_PORT"])
    dist.init_process_group("storm", pg_options=stormtorch.Options(silence_s=silence_s, port=port))
    turns = {
        "all_reduce": in_all_reduce,
        "between": between_collectives,
        "barrier": in_barrier,
        "ring": in_ring,
        "backward": InBackward() if scenario == "backward" else None,
    }
    turn: Any = turns[scenario]
    try:
        for step in range(1_000_000):
            turn(step)
    except RuntimeError as error:
        # What comes through autograd or a future is a plain RuntimeError with the same text.
        culprit = error.culprit if isinstance(error, stormtorch.StormError) else None
        say(raised=time.monotonic(), kind=type(error).__name__, culprit=culprit, text=str(error))
    dist.destroy_process_group()
    say(destroyed=time.monotonic())


if __name__ == "__main__":
    main(sys.argv[1])

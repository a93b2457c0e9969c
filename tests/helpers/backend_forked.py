"""A rank whose process forks in the middle of a job: calls of the child, and the effect on the job."""

import json
import os
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

import stormtorch

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def outcome_of(call: Any) -> str:
    """The error that a call raises, and how long that took."""
    begin = time.monotonic()
    try:
        call()
    except stormtorch.StormError as error:
        return f"{type(error).__name__} after {time.monotonic() - begin:.0f} s: {error}"
    return "no error"


def use() -> None:
    """In a child: every kind of call."""
    pending: Any = works[0]
    group: Any = dist.distributed_c10d._get_default_group()
    say(
        all_reduce=outcome_of(lambda: dist.all_reduce(torch.ones(3))),
        wait=outcome_of(pending.wait),
        barrier=outcome_of(group.monitored_barrier),
        send=outcome_of(lambda: dist.send(torch.ones(3), 1 - rank)),
    )


def destroy() -> None:
    """In a child: the end of all groups, twice."""
    dist.destroy_process_group()
    transport.close()
    transport.close(0.0)
    say(destroyed=True)


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index))

    def __len__(self) -> int:
        return 8


def in_child(work: Any, *, leaves_at_once: bool) -> None:
    """Forks, and waits for the child. One that does not leave at once ends as any program does."""
    child = os.fork()
    if child == 0:
        work()
        if leaves_at_once:
            os._exit(0)
        sys.exit(0)
    deadline = time.monotonic() + 20.0
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, 9)
            os.waitpid(child, 0)
            say(hung=work.__name__)
            return
        time.sleep(0.01)


def summed() -> float:
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    return float(tensor.sum())


def busy(group: Any) -> None:
    for _ in range(300):
        dist.all_reduce(torch.ones(20_000), group=group)


torch.set_num_threads(1)
dist.init_process_group("storm", pg_options=stormtorch.Options(silence_s=3.0, timeout_s=20.0))
default: Any = dist.distributed_c10d._get_default_group()
transport = default.group.transport
beside = dist.new_group()
works = [dist.all_reduce(torch.ones(10), async_op=True)]
say(before=summed())
if rank == 0:
    in_child(use, leaves_at_once=True)
    say(after_use=True)
    in_child(destroy, leaves_at_once=True)
    in_child(destroy, leaves_at_once=False)
    in_child(lambda: None, leaves_at_once=False)
say(after_children=summed())
# While another thread is in the engine, a fork may come at any moment.
thread = threading.Thread(target=busy, args=(beside,))
thread.start()
if rank == 0:
    for _ in range(5):
        in_child(destroy, leaves_at_once=False)
        time.sleep(0.005)
thread.join()
loaded = []
for batch in torch.utils.data.DataLoader(Numbers(), batch_size=2, num_workers=2, multiprocessing_context="fork"):
    dist.all_reduce(batch)
    loaded += batch.tolist()
say(loaded=loaded, finally_=summed())
works[0].wait()
dist.destroy_process_group()

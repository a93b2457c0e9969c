"""A rank that blocks in a collective until it is interrupted. It prints errors and their times."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public, but not marked as exported

import stormtorch

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def join(name: str = "first", **settings: Any) -> Any:
    store = TCPStore(
        "127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=rank == 0 and name == "first", wait_for_workers=False
    )
    members = settings.pop("members", range(world))
    timeout = timedelta(seconds=settings.pop("timeout_s", 60.0))
    dist.init_process_group(
        "storm",
        store=PrefixStore(name, store),
        rank=list(members).index(rank),
        world_size=len(members),
        timeout=timeout,
        pg_options=stormtorch.Options(port=int(os.environ["STORM_PORT"]), **settings),
    )
    return store


def group() -> Any:
    return dist.distributed_c10d._get_default_group()


# Rank 0 takes part in none of them.
CALLS: dict[str, Callable[[], object]] = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(100_000)),
    "async": lambda: dist.all_reduce(torch.ones(10), async_op=True).wait(),
    "future": lambda: dist.all_reduce(torch.ones(10), async_op=True).get_future().wait(),
    "barrier": dist.barrier,
    "monitored_barrier": lambda: group().monitored_barrier(timedelta(seconds=60)),
    "recv": lambda: dist.recv(torch.empty(10), 0),
    "anybody": lambda: dist.recv(torch.empty(10)),
    "send": lambda: dist.send(torch.ones(1_000_000), 0),
    "object": lambda: dist.all_gather_object([None] * world, rank),
}


def interrupted(call: str) -> None:
    """Ctrl-C in a call, then an orderly end."""
    store = join()
    try:
        if rank == 0:
            say(blocked=True)
            time.sleep(60)
        say(blocked=True)
        CALLS[call]()
    except KeyboardInterrupt:
        say(raised=time.monotonic())
    dist.destroy_process_group()
    say(destroyed=time.monotonic())
    store.add("left", 1)
    while rank == 0 and store.add("left", 0) < world:  # it serves the store
        time.sleep(0.01)


def left(_: str) -> None:
    """Ctrl-C on rank 1 alone: the others are notified."""
    store = join()
    try:
        say(blocked=True)
        CALLS["all_reduce"]() if rank != 0 else dist.recv(torch.empty(10), 1)
    except KeyboardInterrupt:
        say(raised=time.monotonic())
    except stormtorch.StormError as error:
        say(raised=time.monotonic(), text=str(error), culprit=error.culprit)
    dist.destroy_process_group()
    store.add("left", 1)
    while rank == 0 and store.add("left", 0) < world:
        time.sleep(0.01)


def aborted(call: str) -> None:
    """Another thread aborts the group while this one waits; then all start again."""
    store = join()

    def abort() -> None:
        say(aborted=time.monotonic())
        group().abort()

    if rank == 1:
        threading.Timer(0.5, abort).start()
        try:
            CALLS[call]()
        except RuntimeError as error:  # a future's has the text alone
            say(raised=time.monotonic(), kind=type(error).__name__, text=str(error))
    else:
        time.sleep(1.0)
    dist.destroy_process_group()
    restart_group(store)


def abandoned(call: str) -> None:
    """The same with a dead peer that is not detected yet."""
    join()
    dist.barrier()
    if rank == 0:
        os.kill(os.getpid(), 9)
    threading.Timer(0.3, group().abort).start()
    began = time.monotonic()
    try:
        CALLS[call]()
    except stormtorch.StormError as error:
        say(took=time.monotonic() - began - 0.3, kind=type(error).__name__)
    dist.destroy_process_group()


def failed(_: str) -> None:
    """An error, the end of the group, and a second beginning in the same process; twice."""
    store = join(timeout_s=0.5)
    try:
        if rank == 0:
            store.get("over")  # too late
        dist.all_reduce(torch.ones(10))
    except stormtorch.StormError as error:
        say(kind=type(error).__name__, text=str(error))
    store.set("over", "1")
    dist.destroy_process_group()
    restart_group(store)


def bereaved(_: str) -> None:
    """Rank 1 dies; the others form a new group without it."""
    store = join(silence_s=1.0)
    try:
        for step in range(1000):
            if rank == 1 and step == 3:
                os.kill(os.getpid(), 9)
            dist.all_reduce(torch.ones(10))
    except stormtorch.StormError as error:
        say(culprit=error.culprit)
    dist.destroy_process_group()
    restart_group(store, [each for each in range(world) if each != 1])


def restart_group(store: Any, members: Any = range(world)) -> None:
    for name in ("second", "third"):
        join(name, members=members)
        tensor = torch.ones(1000)
        dist.all_reduce(tensor)
        dist.barrier()
        dist.destroy_process_group()
        say(**{name: tensor.sum().item()})
    store.add("left", 1)
    while rank == 0 and store.add("left", 0) < len(members):
        time.sleep(0.01)


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, _, call = sys.argv[1].partition(":")
    scenarios = [interrupted, left, aborted, abandoned, failed, bereaved]
    {each.__name__: each for each in scenarios}[what](call)

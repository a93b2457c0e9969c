"""Ranks whose members watch each other, in one thread: time is the test's own, and others act while a rank sleeps."""

import threading
from collections.abc import Callable
from typing import Any

from torch.distributed.distributed_c10d import Store

from stormtorch import Options, connect
from stormtorch.collectives import Group
from stormtorch.runtime.members import Members
from stormtorch.transport.rendezvous import rejoin
from stormtorch.transport.udp import UdpTransport

# Longer than a busy machine keeps anybody waiting, so that nobody falls silent by accident; who leaves does not linger.
OPTIONS = Options(silence_s=20.0, timeout_s=60.0, linger_s=0.0)


class Clock:
    """Takes the place of the module `time`."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.meanwhile: list[Callable[[], Any]] = []
        """What others do during the next sleeps, one thing in each."""

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        if self.meanwhile:
            self.meanwhile.pop(0)()


class Job:
    """Transports over loopback that share a store. A transport may be used from any thread."""

    def __init__(self, world: int, store: Store) -> None:
        self.world = world
        self.store = store
        found: dict[int, UdpTransport] = {}

        def join(rank: int) -> None:
            found[rank] = connect(store, rank, world, OPTIONS)

        # Each waits for the others' addresses.
        threads = [threading.Thread(target=join, args=(rank,)) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.transports = [found[rank] for rank in range(world)]

    def members(self, rank: int, *, give_up_s: float = 60.0) -> Members:
        return Members(Group(self.transports[rank]), "t", 100, give_up_s)

    def restart(self, rank: int) -> Members:
        """Lets another process take a rank's place, and returns the members that it would have."""
        self.transports[rank].close(0.0)
        self.transports[rank] = rejoin(self.store, rank, self.world, OPTIONS)
        return self.members(rank)

    def close(self) -> None:
        for transport in self.transports:
            transport.close(0.0)


def hear(members: Members, *heard: int, step: int = 0) -> tuple[list[int], list[str]]:
    """Who is missing after a step in which others were heard of, and what is new."""
    events: list[str] = []
    return members.hear(set(heard), step, events), events

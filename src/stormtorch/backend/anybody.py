"""Receives from whoever sends first, and their order with receives from a known rank.

A receive names its sender to the engine. One from anybody therefore waits for everybody at once; what it does not use
stands ready for the next receive from that sender.
"""

import time

import torch

from stormtorch.collectives import Group, Pending, receive
from stormtorch.collectives.group import nothing
from stormtorch.errors import ExchangeTimeout

_POLL_S = 100e-6


class Receives:
    """The receives of one group, in the order of each sender's messages."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._ready: dict[tuple[int, int], tuple[Pending, torch.Tensor]] = {}

    def start(self, out: torch.Tensor, source: int, tag: int, timeout_s: float) -> Pending:
        """Begins a receive from one rank."""
        waiting = self._ready.pop((source, tag), None)
        if waiting is None:
            return receive(self._group, out, source, tag=tag, timeout_s=timeout_s)
        _take(waiting, out)
        return self._group.start(nothing())

    def from_anybody(self, out: torch.Tensor, tag: int, timeout_s: float) -> int:
        """Blocks until somebody's message is there, and returns whose."""
        for source in self._group.others():
            if (source, tag) not in self._ready:
                into = torch.empty_like(out)
                # Without a time-out of its own: it may be used much later.
                self._ready[source, tag] = receive(self._group, into, source, tag=tag, timeout_s=1e6), into
        give_up_at = time.monotonic() + timeout_s
        while time.monotonic() < give_up_at:
            for source in self._group.others():
                if self._ready[source, tag][0].done():
                    _take(self._ready.pop((source, tag)), out)
                    return source
            time.sleep(_POLL_S)
        raise ExchangeTimeout(f"rank {self._group.rank}: recv: nobody sent with tag {tag} for {timeout_s:g} s.")


def _take(waiting: tuple[Pending, torch.Tensor], out: torch.Tensor) -> None:
    pending, into = waiting
    pending.wait()
    out.copy_(into)

"""Receives from whoever sends first, and their order with receives from a known rank.

A receive names its sender to the engine. One from anybody therefore waits for everybody at once; what it does not use
stands ready for the next receive from that sender.
"""

import threading
import time
from collections.abc import Callable

import torch

from stormtorch.collectives import Group, Pending, receive
from stormtorch.errors import ExchangeTimeout, StormError

_POLL_S = 100e-6
# Of a receive that may be used much later: its user's time-out counts, not its own.
_FOREVER_S = 1e6


class Receives:
    """The receives of one group, in the order of each sender's messages."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._ready: dict[tuple[int, int], tuple[Pending, torch.Tensor]] = {}
        self._lock = threading.Lock()

    def start(self, out: torch.Tensor, source: int, tag: int, timeout_s: float) -> "Pending | Taking":
        """Begins a receive from one rank."""
        with self._lock:
            waiting = self._ready.pop((source, tag), None)
        if waiting is None:
            return receive(self._group, out, source, tag=tag, timeout_s=timeout_s)
        return Taking(
            lambda: source if _take(waiting, out) else None,
            f"rank {self._group.rank}: recv: nothing came from rank {source} with tag {tag}",
            timeout_s,
        )

    def from_anybody(self, out: torch.Tensor, tag: int, timeout_s: float) -> "Taking":
        """Begins a receive from whoever sends first."""
        self._post(out, tag)
        return Taking(
            lambda: self._first(out, tag),
            f"rank {self._group.rank}: recv: nobody sent with tag {tag}",
            timeout_s,
        )

    def _post(self, out: torch.Tensor, tag: int) -> None:
        with self._lock:
            for source in self._group.others():
                if (source, tag) not in self._ready:
                    into = torch.empty_like(out)
                    pending = receive(self._group, into, source, tag=tag, timeout_s=_FOREVER_S)
                    self._ready[source, tag] = pending, into

    def _first(self, out: torch.Tensor, tag: int) -> int | None:
        """Whose message is there, which then stands in `out`."""
        self._post(out, tag)  # another receive from anybody may have used some
        with self._lock:
            for source in self._group.others():
                if _take(self._ready[source, tag], out):
                    del self._ready[source, tag]
                    return source
        return None


class Taking:
    """A receive that takes a message already asked for, as soon as it is there. A `Pending` to whoever waits."""

    exchanges = 1

    def __init__(self, take: Callable[[], int | None], missing: str, timeout_s: float) -> None:
        self._take, self._missing, self._timeout_s = take, missing, timeout_s
        self._give_up_at = time.monotonic() + timeout_s
        self.source: int | None = None
        """Who sent it, once it is there."""
        self.ended = False

    def done(self) -> bool:
        """Whether it has ended, well or not, so that `wait` does not block."""
        try:
            return self._look() or time.monotonic() >= self._give_up_at
        except StormError:
            return True  # and `wait` will raise it again

    def wait(self, timeout_s: float | None = None) -> None:
        """Blocks until it is there, at most until the receive's own time is over."""
        begin = time.monotonic()
        give_up_at = self._give_up_at if timeout_s is None else min(begin + timeout_s, self._give_up_at)
        while not self._look():
            if time.monotonic() >= give_up_at:
                self.ended = give_up_at == self._give_up_at
                raise ExchangeTimeout(f"{self._missing} for {self._timeout_s if self.ended else timeout_s:g} s.")
            time.sleep(_POLL_S)

    def _look(self) -> bool:
        if not self.ended:
            self.source = self._take()
            self.ended = self.source is not None
        return self.ended


def _take(waiting: tuple[Pending, torch.Tensor], out: torch.Tensor) -> bool:
    pending, into = waiting
    if not pending.done():
        return False
    pending.wait()
    out.copy_(into)
    return True

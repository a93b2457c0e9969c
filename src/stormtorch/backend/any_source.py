"""Receives from whoever sends first, and their order with receives from a known rank.

A receive names its sender to the engine. One from anybody therefore asks everybody at once; what it does not use stands
ready for the next receive from that sender, which must have the same number of bytes.
"""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable

import torch

from stormtorch.collectives import Group, Pending, receive
from stormtorch.errors import ExchangeTimeout, SizeMismatch

_POLL_S = 100e-6
# Of a receive that may be used much later: its user's time-out counts, not its own.
_FOREVER_S = 1e6
Asked = tuple[Pending, torch.Tensor]


class Receives:
    """The receives of one group, in the order of each sender's messages."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._asked: defaultdict[tuple[int, int], deque[Asked]] = defaultdict(deque)
        self._open: defaultdict[int, int] = defaultdict(int)
        """By tag, how many receives from anybody have not got theirs."""
        self._lock = threading.Lock()

    def start(self, out: torch.Tensor, source: int, tag: int, timeout_s: float) -> "Pending | Taking":
        """Begins a receive from one rank."""
        with self._lock:
            if not self._asked[source, tag]:
                return receive(self._group, out, source, tag=tag, timeout_s=timeout_s)
            asked = self._asked[source, tag].popleft()
        where = f"rank {self._group.rank}: recv"
        if asked[1].nbytes != out.nbytes:
            raise SizeMismatch(
                f"{where}: with tag {tag}, a receive without a source has asked rank {source} for {asked[1].nbytes} "
                f"bytes before, and this one wants {out.nbytes}. Use another tag where sizes differ."
            )
        return Taking(
            lambda: source if _take(asked, out) else None,
            f"{where}: nothing came from rank {source}, tag {tag},",
            timeout_s,
        )

    def from_anybody(self, out: torch.Tensor, tag: int, timeout_s: float) -> "Taking":
        """Begins a receive from whoever sends first."""
        with self._lock:
            self._open[tag] += 1
            self._ask(out, tag)
        return Taking(
            lambda: self._first(out, tag), f"rank {self._group.rank}: recv: nobody sent with tag {tag}", timeout_s
        )

    def _ask(self, out: torch.Tensor, tag: int) -> None:
        """Asks everybody for as many messages as are waited for: all of them may come from one."""
        for source in self._group.others():
            asked = self._asked[source, tag]
            while len(asked) < self._open[tag]:
                into = torch.empty_like(out)
                asked.append((receive(self._group, into, source, tag=tag, timeout_s=_FOREVER_S), into))

    def _first(self, out: torch.Tensor, tag: int) -> int | None:
        """Whose message is there, which then stands in `out`."""
        with self._lock:
            self._ask(out, tag)  # a receive from a known rank may have used some
            for source in self._group.others():
                if _take(self._asked[source, tag][0], out):
                    self._asked[source, tag].popleft()
                    self._open[tag] -= 1
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
        except Exception:
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


def _take(asked: Asked, out: torch.Tensor) -> bool:
    pending, into = asked
    if not pending.done():
        return False
    pending.wait()
    # Bytes: the receive that asked for them may have had another type.
    out.view(-1).view(torch.uint8).copy_(into.view(-1).view(torch.uint8))
    return True

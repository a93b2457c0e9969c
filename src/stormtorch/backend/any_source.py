"""Receives from any source (`recv` without `src`): they take the message that arrives first.

The engine receives from a named sender only, so a receive from any source posts one from every other rank. Those that
it does not use stay posted for the next receives from the same sender and tag, which must have the same number of
bytes.
"""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable

import torch

from stormtorch.collectives import Group, Pending, receive
from stormtorch.errors import ExchangeTimeout, SizeMismatch

_POLL_S = 100e-6
# A posted receive may be used much later: the timeout of the receive that takes the message applies, not its own.
_FOREVER_S = 1e6
Posted = tuple[Pending, torch.Tensor]


class AnySourceReceives:
    """Posted receives of one group, which keep the order of each sender's messages."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._posted: defaultdict[tuple[int, int], deque[Posted]] = defaultdict(deque)
        """Posted receives that no call has taken yet, by source and tag."""
        self._open: defaultdict[int, int] = defaultdict(int)
        """Number of receives from any source that still lack a message, by tag."""
        self._lock = threading.Lock()

    def from_source(self, out: torch.Tensor, source: int, tag: int, timeout_s: float) -> "Pending | PostedReceive":
        """Starts a receive from one rank."""
        with self._lock:
            if not self._posted[source, tag]:
                return receive(self._group, out, source, tag=tag, timeout_s=timeout_s)
            posted = self._posted[source, tag].popleft()
        where = f"rank {self._group.rank}: recv"
        if posted[1].nbytes != out.nbytes:
            raise SizeMismatch(
                f"{where}: expects {out.nbytes} bytes from rank {source} with tag {tag}, but an earlier receive from "
                f"any source has posted one of {posted[1].nbytes} bytes. Use another tag for messages of another size."
            )
        return PostedReceive(
            lambda: source if _take(posted, out) else None,
            f"{where}: nothing received from rank {source} with tag {tag}",
            timeout_s,
        )

    def from_any_source(self, out: torch.Tensor, tag: int, timeout_s: float) -> "PostedReceive":
        """Starts a receive from whichever rank sends first."""
        with self._lock:
            self._open[tag] += 1
            self._post(out, tag)
        return PostedReceive(
            lambda: self._first(out, tag), f"rank {self._group.rank}: recv: no rank sent with tag {tag}", timeout_s
        )

    def _post(self, out: torch.Tensor, tag: int) -> None:
        """Posts as many receives from every rank as lack a message, since one rank may send them all."""
        for source in self._group.others():
            posted = self._posted[source, tag]
            while len(posted) < self._open[tag]:
                into = torch.empty_like(out)
                posted.append((receive(self._group, into, source, tag=tag, timeout_s=_FOREVER_S), into))

    def _first(self, out: torch.Tensor, tag: int) -> int | None:
        """Copies the first message that has arrived into `out` and returns its source; None if there is none."""
        with self._lock:
            self._post(out, tag)  # a receive from a named rank may have used some
            for source in self._group.others():
                if _take(self._posted[source, tag][0], out):
                    self._posted[source, tag].popleft()
                    self._open[tag] -= 1
                    return source
        return None


class PostedReceive:
    """Receive that takes the message of an earlier posted receive. Behaves like a `Pending`."""

    exchanges = 1

    def __init__(self, take: Callable[[], int | None], missing: str, timeout_s: float) -> None:
        self._take, self._missing, self._timeout_s = take, missing, timeout_s
        self._give_up_at = time.monotonic() + timeout_s
        self.source: int | None = None
        """Rank that sent the message; None until it has arrived."""
        self.ended = False

    def done(self) -> bool:
        """True once the exchange has completed or failed: `wait` then returns at once."""
        try:
            return self._look() or time.monotonic() >= self._give_up_at
        except Exception:
            return True  # `wait` will raise the error again

    def wait(self, timeout_s: float | None = None) -> None:
        """Blocks until the message has arrived, or until `timeout_s` or the receive's own timeout has passed."""
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


def _take(posted: Posted, out: torch.Tensor) -> bool:
    pending, into = posted
    if not pending.done():
        return False
    pending.wait()
    # Copy bytes: the receive that was posted may have had another type.
    out.view(-1).view(torch.uint8).copy_(into.view(-1).view(torch.uint8))
    return True

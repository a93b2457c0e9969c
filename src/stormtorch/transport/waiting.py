"""What a rank does while it waits: it takes part in calls that others have begun, and says so if nothing moves.

Most waits last milliseconds and cost nothing here. A transport looks here only when a slice of waiting has passed.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Collection, Iterator
from typing import Any, Protocol

_log = logging.getLogger("stormtorch")

FIRST_SLICE_S = 0.03
"""A wait that is shorter than this is never interrupted."""
SLICE_S = 0.1
ANNOUNCE_AFTER_S = 10.0
"""A rank that waits for so long while nothing moves says so."""
BACKWARD = "backward()"
# Written before it is read, so that ranks that began to wait at the same time know of each other.
_WRITE_AFTER = 0.5
# Pings, and requests to say it again, move as well: less than this is nothing. Per look, and per rank.
_NOTHING_BYTES = 16 << 10
_NOTHING_BYTES_PER_RANK = 2 << 10


class _Doing(threading.local):
    what: str | None = None
    elsewhere = False


_doing = _Doing()


@contextlib.contextmanager
def doing(what: str, *, elsewhere: bool = False) -> Iterator[None]:
    """Within it, this thread's waits belong to a call that all ranks must make. The outermost one counts.

    Args:
        what: The call, as the user knows it.
        elsewhere: It is none of a training's, which may be at work in another thread.
    """
    before = _doing.what, _doing.elsewhere
    if _doing.what is None:
        _doing.what, _doing.elsewhere = what, elsewhere
    try:
        yield
    finally:
        _doing.what, _doing.elsewhere = before


def is_elsewhere() -> bool:
    """Whether this thread waits in a call that is none of a training's."""
    return _doing.elsewhere


def attends() -> bool:
    """Whether this thread may take part in what others begin. Unknown ones may not: a training could be in use."""
    return _doing.what is not None


class Server(Protocol):
    """Somebody who can take part in calls that other ranks have begun."""

    def awaited(self) -> bool:
        """Whether others have begun one, and taking part is possible now. Never blocks."""
        ...

    def serve(self) -> None:
        """Takes part in it."""
        ...

    def part(self) -> None:
        """Called before this rank leaves: waits as long as others may still call for what it owns."""
        ...


class Servers:
    """The servers of one transport. They are held weakly, and asked in the order in which they came."""

    def __init__(self) -> None:
        self._servers: list[weakref.ref[Server]] = []

    def offer(self, server: Server) -> None:
        """Asks this one too, as long as it lives."""
        self._servers = [each for each in self._servers if each() is not None]
        self._servers.append(weakref.ref(server))

    def awaited(self) -> Server | None:
        """The first server that is awaited."""
        for found in self._servers:
            server = found()
            if server is not None and server.awaited():
                return server
        return None

    def part(self) -> None:
        """Waits, before the transport is closed, until no other rank needs what this one owns."""
        for found in self._servers:
            server = found()
            if server is not None:
                server.part()


class Patience:
    """One wait that lasts: serves others, and after a while tells who waits in what.

    Args:
        transport: Whose wait.
        peers: Ranks that are waited for, among others.
    """

    def __init__(self, transport: Any, peers: Collection[int]) -> None:
        self._transport = transport
        self._peers = peers
        self._quiet_since = time.monotonic()
        self._moved = self._bytes()
        self._written = False
        self._next_s = ANNOUNCE_AFTER_S

    def look(self) -> None:
        """To be called after each slice of waiting."""
        what = _doing.what
        if what is None:
            return
        server = self._transport.servers.awaited()
        if server is not None:
            server.serve()
            self._quiet_since = time.monotonic()
        moved = self._bytes()
        if moved - self._moved > _NOTHING_BYTES + _NOTHING_BYTES_PER_RANK * self._transport.world:
            self._quiet_since = time.monotonic()
        self._moved = moved
        quiet_s = time.monotonic() - self._quiet_since
        if quiet_s >= _WRITE_AFTER * ANNOUNCE_AFTER_S and not self._written:
            self._written = True
            self._write(what)
        if quiet_s >= self._next_s:
            self._next_s = max(3 * self._next_s, 3 * ANNOUNCE_AFTER_S)
            _log.warning(
                "rank %d has waited %.0f s in %s: %s. All ranks must make this call; has one gone another way?",
                *(self._transport.rank, quiet_s, what, self._others()),
            )

    def end(self) -> None:
        """The wait is over."""
        if self._written:
            self._write("")

    def _bytes(self) -> int:
        health = self._transport.health()
        return int(health["bytes_received"]) + int(health["bytes_sent"])

    def _key(self, rank: int) -> str:
        return f"{self._transport.prefix}/waits/{rank}"

    def _write(self, what: str) -> None:
        with contextlib.suppress(RuntimeError):  # the store may be gone with the rank that had it
            self._transport.store.set(self._key(self._transport.rank), what)

    def _others(self) -> str:
        told = []
        for peer in sorted(self._peers):
            what = ""
            with contextlib.suppress(RuntimeError):
                if self._transport.store.check([self._key(peer)]):
                    what = self._transport.store.get(self._key(peer)).decode()
            told.append(f"rank {peer} waits in {what}" if what else f"rank {peer} computes, or does something else")
        shown, rest = told[:8], len(told) - 8
        return "; ".join(shown) + (f"; and {rest} others" if rest > 0 else "")

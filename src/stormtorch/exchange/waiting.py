"""While a rank blocks, it serves collectives that other ranks have started, and logs a warning if no data moves.

Most waits last milliseconds and cost nothing here: a transport calls this module only after a first slice of waiting.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import stormtorch._engine as _engine

_log = logging.getLogger("stormtorch")

FIRST_SLICE_S = 0.03
"""Length of a wait's first slice: shorter waits are never interrupted."""
SLICE_S = 0.1
INTERRUPT_SLICE_S = 0.03
"""Longest slice of a wait that may be interrupted."""
UNCLEAR_S = 0.3
"""Time for which an interrupted exchange waits for peers whose participation is unknown."""
ANNOUNCE_AFTER_S = 10.0
"""Time of waiting in one call after which a rank logs a warning."""
SLOW_AGAIN_S = 60.0
"""Interval of the warnings while data moves, as on a link that is always slow."""
SLOW_TRIP_S = 0.5
"""Round-trip time from which on the network is reported as the cause of a wait."""
BACKWARD = "backward()"
# Fraction of ANNOUNCE_AFTER_S after which a rank writes the call in which it waits into the store. It is below 1, so
# that ranks that began to wait at the same time find each other's entry when they warn.
_WRITE_AFTER = 0.5
# Traffic that counts as none, per look and per rank: pings and repeated requests never cease.
_NOTHING_BYTES = 16 << 10
_NOTHING_BYTES_PER_RANK = 2 << 10


class _Doing(threading.local):
    what: str | None = None
    elsewhere = False
    in_background = False
    waited_s = 0.0
    """Time of the waits that have ended in this call."""


_call = _Doing()


class in_call:  # a context manager, entered so often in a step that a generator would cost time
    """Marks the waits of this thread within the block as part of a call that all ranks must make.

    Of nested blocks, the outermost counts.

    Args:
        what: Name of the call, as the user knows it.
        elsewhere: Whether the call belongs to no training; a training may be running in another thread.
    """

    __slots__ = ("_elsewhere", "_outermost", "_what")

    def __init__(self, what: str, *, elsewhere: bool = False) -> None:
        self._what, self._elsewhere, self._outermost = what, elsewhere, False

    def __enter__(self) -> None:
        if _call.what is None:
            self._outermost = True
            _call.what, _call.elsewhere, _call.waited_s = self._what, self._elsewhere, 0.0

    def __exit__(self, *_: object) -> None:
        if self._outermost:
            _call.what, _call.elsewhere = None, False


def is_elsewhere() -> bool:
    """Whether this thread waits in a call that belongs to no training."""
    return _call.elsewhere


def serves_collectives() -> bool:
    """Whether this thread may serve other ranks' collectives: only within `in_call`, as it could disturb training."""
    return _call.what is not None


@contextlib.contextmanager
def in_background() -> Iterator[None]:
    """Marks the waits of this thread within the block as background work: the rank itself is not blocked."""
    _call.in_background = True
    try:
        yield
    finally:
        _call.in_background = False


class CollectiveServer(Protocol):
    """An object that takes part in collectives that other ranks have started."""

    def requested(self) -> bool:
        """Whether other ranks have started a collective in which this rank can take part now. Never blocks."""
        ...

    def serve(self) -> None:
        """Takes part in that collective."""
        ...

    def drain(self) -> None:
        """Waits, before this rank leaves, until no other rank needs the state that it owns."""
        ...


class CollectiveServers:
    """The collective servers of one transport, held weakly and polled in the order in which they were added."""

    def __init__(self) -> None:
        self._servers: list[weakref.ref[CollectiveServer]] = []
        self.draining = False
        """Whether this rank is about to leave."""
        self.next_slow_s = 0.0
        """Earliest time of the next warning while data moves, by `time.monotonic`."""

    def offer(self, server: CollectiveServer) -> None:
        """Adds a server, as long as it lives."""
        self._servers = [each for each in self._servers if each() is not None]
        self._servers.append(weakref.ref(server))

    def requested(self) -> CollectiveServer | None:
        """Returns the first server for which other ranks wait, or None."""
        for found in self._servers:
            server = found()
            if server is not None and server.requested():
                return server
        return None

    def drain(self) -> None:
        """Waits, before the transport is closed, until no other rank needs the state that this one owns."""
        self.draining = True
        for found in self._servers:
            server = found()
            if server is not None:
                server.drain()


@dataclass(frozen=True, slots=True)
class CurrentWait:
    """A wait that has lasted for a slice or more, for status reports."""

    call: str
    """Name of the call, as the user knows it."""
    since: float
    """Begin of the wait, by `time.monotonic`."""
    peers: Collection[int]
    """Ranks that take part in the exchange."""


class Interruption:
    """Decides whether a wait that a new view interrupts is aborted.

    The wait goes on as long as the exchange can complete, because a rank whose exchange is complete may exit. If the
    others aborted then, they would wait in the next view for a rank that is gone, and perhaps lack a majority.
    """

    def __init__(self) -> None:
        self._since_s: float | None = None

    def should_abort(self, can_complete: _engine.CanComplete, now_s: float, unclear_s: float = UNCLEAR_S) -> bool:
        """Whether to abort now; to be called while the interruption lasts.

        Args:
            can_complete: Whether the exchange can complete, as the engine reports it.
            now_s: Time in seconds, of any clock.
            unclear_s: Longest time for which the wait goes on if that is unclear.
        """
        if self._since_s is None:
            self._since_s = now_s
        if can_complete == _engine.CanComplete.UNCLEAR:
            return now_s - self._since_s >= unclear_s
        return can_complete == _engine.CanComplete.NONE


class LongWait:
    """A long wait: serves other ranks' collectives meanwhile, and after a while logs which rank waits in which call.

    Args:
        transport: Transport that waits.
        peers: Ranks that take part in the exchange.
    """

    def __init__(self, transport: Any, peers: Collection[int]) -> None:
        self._transport = transport
        self._peers = peers
        self._since = self._quiet_since = time.monotonic()
        self._moved = self._bytes()
        self._written = False
        self._next_s = ANNOUNCE_AFTER_S
        self._shown = not _call.in_background
        if self._shown:
            self._transport.waits = CurrentWait(_call.what or "a collective", self._quiet_since, peers)

    def look(self) -> None:
        """Serves other ranks' collectives and checks whether data moves; to be called after each slice of waiting."""
        what = _call.what
        if what is None:
            return
        server = self._transport.collective_servers.requested()
        if server is not None:
            server.serve()
            self._quiet_since = time.monotonic()
        moved = self._bytes()
        if moved - self._moved > _NOTHING_BYTES + _NOTHING_BYTES_PER_RANK * self._transport.world:
            self._quiet_since = time.monotonic()
        self._moved = moved
        now_s = time.monotonic()
        quiet_s, waited_s = now_s - self._quiet_since, _call.waited_s + now_s - self._since
        if waited_s >= _WRITE_AFTER * ANNOUNCE_AFTER_S and not self._written:
            self._written = True
            self._write(what)
        if quiet_s >= self._next_s:
            self._next_s = max(3 * self._next_s, 3 * ANNOUNCE_AFTER_S)
            self._warn(quiet_s, what)
        elif waited_s >= ANNOUNCE_AFTER_S and now_s >= self._transport.collective_servers.next_slow_s:
            self._warn(waited_s, what, moves=quiet_s < _WRITE_AFTER * ANNOUNCE_AFTER_S)

    def _warn(self, waited_s: float, what: str, *, moves: bool = False) -> None:
        self._transport.collective_servers.next_slow_s = time.monotonic() + SLOW_AGAIN_S
        report = "" if moves else self._silent()
        if not report:
            branch = "" if moves else ". All ranks must make this call: has one taken another branch?"
            report = self._others() + (self._slow_link() or branch)
        where = f"{what}, while data moves" if moves else what
        _log.warning("rank %d has waited %.0f s in %s: %s", self._transport.rank, waited_s, where, report)

    def end(self) -> None:
        """Ends the wait, and clears its entry in the store."""
        _call.waited_s += time.monotonic() - self._since
        if self._shown:
            self._transport.waits = None
        if self._written:
            self._write("")

    def _silent(self) -> str:
        """Text that names the silent peers; empty if there are none, or if this rank does not watch its peers."""
        connectivity = self._transport.connectivity()
        last_received, silence_s = connectivity["heard_s"], self._transport.silence_s
        silent = [peer for peer in sorted(self._peers) if peer in last_received and last_received[peer] > silence_s]
        if not silent:
            return ""
        longest = max(last_received[peer] for peer in silent)
        majority = "" if connectivity["quorum"] else ", so this rank cannot reach a majority and must wait for one"
        return f"nothing was received from rank {', '.join(map(str, silent))} for {longest:.0f} s{majority}"

    def _slow_link(self) -> str:
        """Text that names a link so slow that it explains the wait; empty if there is none."""
        peers = sorted(self._peers)
        links = [(*link[:3], peer) for peer, link in zip(peers, self._transport.links(peers), strict=True)]
        round_trip_s, loss, bytes_per_s, peer = max(links, default=(0.0, 0.0, 0.0, 0))
        if round_trip_s < SLOW_TRIP_S:
            return ""
        return (
            f". The network is slow: the round trip to rank {peer} takes {round_trip_s:.1f} s, {100 * loss:.0f} % of "
            f"its datagrams are lost, and this rank sends it {bytes_per_s * 8e-6:.1f} Mbit/s. Is a queue on the path "
            "full?"
        )

    def _bytes(self) -> int:
        health = self._transport.health()
        ways = ("bytes_received", "bytes_sent", "shared_bytes_received", "shared_bytes_sent")
        return sum(int(health[each]) for each in ways)

    def _key(self, rank: int) -> str:
        return f"{self._transport.prefix}/waits/{rank}"

    def _write(self, what: str) -> None:
        with contextlib.suppress(RuntimeError):  # the store may have ended with the rank that served it
            self._transport.store.set(self._key(self._transport.rank), what)

    def _others(self) -> str:
        report = []
        for peer in sorted(self._peers):
            what = ""
            with contextlib.suppress(RuntimeError):
                if self._transport.store.check([self._key(peer)]):
                    what = self._transport.store.get(self._key(peer)).decode()
            report.append(f"rank {peer} waits in {what}" if what else f"rank {peer} computes or does something else")
        shown, rest = report[:8], len(report) - 8
        return "; ".join(shown) + (f"; and {rest} others" if rest > 0 else "")

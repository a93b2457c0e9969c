"""Setup of shared-memory channels between ranks of one machine: a handshake over a Unix socket passes descriptors.

Of two ranks, the lower connects to the higher one's socket, whose abstract name follows from its card. Until the
handshake completes, and if it fails, data travels by datagram as between machines.
"""

import array
import atexit
import contextlib
import hashlib
import hmac
import json
import logging
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import stormtorch._engine as _engine
from stormtorch.exchange.options import MOST_LANES
from stormtorch.udp.cards import Card
from stormtorch.udp.machine import machine_id

_log = logging.getLogger("stormtorch")
# Longest time until the thread notices that its transport was collected.
_SLICE_S = 1.0
# Longest time for which one side of a handshake waits for the other.
_ANSWER_S = 2.0
_FIRST_NAP_S, _LONGEST_NAP_S = 0.01, 1.0
# A peer that has not agreed by then may never agree: warn, and try less often.
_WARN_S, _RARE_NAP_S = 60.0, 30.0
_MOST_BYTES = 1024


class SharedMemoryTransport(Protocol):
    """What this module uses of a transport: see `stormtorch.udp.udp`."""

    rank: int
    endpoint: _engine.Endpoint
    cards: dict[int, Card]
    keys_of: Callable[[int, Card, int], bytes]
    """Returns the keys of a lane of the link to a process: sealing, then opening; empty without a job key."""
    closed: bool


class SharedMemorySetup:
    """A thread that sets up shared-memory channels with the other ranks of this machine, until it is closed."""

    def __init__(self, transport: SharedMemoryTransport) -> None:
        self._transport = weakref.ref(transport)
        self._rank = transport.rank
        self._wanted: dict[int, _PendingPeer] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(_name(transport.cards[transport.rank]))
        self._listener.listen(64)
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        for peer, card in transport.cards.items():
            self.request_peer(peer, card)
        self._thread = threading.Thread(target=self._run, name="sharing", daemon=True)
        _all.add(self)
        try:
            self._thread.start()
        except RuntimeError:
            self.close_sockets()
            raise

    def request_peer(self, peer: int, card: Card) -> None:
        """Requests a channel to a card's process if it is on this machine and its rank is higher. Returns at once."""
        if card.machine and card.machine == machine_id() and peer > self._rank:
            with self._lock:
                self._wanted[peer] = _PendingPeer(card)
            self._wake()

    def set_transport(self, transport: SharedMemoryTransport) -> None:
        """Continues on behalf of another transport of the same rank."""
        self._transport = weakref.ref(transport)

    def close_sockets(self) -> None:
        """Closes the sockets without any message: for a forked process, which lacks the thread."""
        for each in (self._listener, self._wake_in, self._wake_out):
            each.close()

    def close(self) -> None:
        """Ends the thread. Existing channels stay: they belong to the engine."""
        self._closed = True
        self._wake()
        if self._thread is not threading.current_thread():
            self._thread.join(2 * _ANSWER_S)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_in.send(b"x")

    def _run(self) -> None:
        ready = select.poll()  # select() knows no descriptors above 1023
        ready.register(self._listener, select.POLLIN)
        ready.register(self._wake_out, select.POLLIN)
        with self._listener, self._wake_in, self._wake_out:
            while not self._closed:
                with self._lock:
                    due_at = min((each.at for each in self._wanted.values()), default=float("inf"))
                wait_s = max(min(due_at - time.monotonic(), _SLICE_S), 0.0)
                readable = {descriptor for descriptor, _ in ready.poll(1000 * wait_s)}
                if self._wake_out.fileno() in readable:
                    self._wake_out.recv(64)
                transport = self._transport()
                if transport is None or transport.closed or self._closed:
                    return
                if self._listener.fileno() in readable:
                    self._serve(transport)
                self._connect_all(transport)
                del transport

    # --- the lower rank connects ------------------------------------------------------------------------------------

    def _connect_all(self, transport: SharedMemoryTransport) -> None:
        now = time.monotonic()
        with self._lock:
            due = {peer: each for peer, each in self._wanted.items() if each.at <= now}
        for peer, wanted in due.items():
            if self._closed:
                return
            try:
                self._connect(transport, peer, wanted.card)
            except (OSError, RuntimeError, ValueError, MemoryError) as error:
                wanted.later(str(error) or type(error).__name__)
            else:
                wanted.done = True
                _log.debug("rank %d: shares memory with rank %d", self._rank, peer)
            if not wanted.done and now >= wanted.warn_at:
                _log.warning(
                    "rank %d: cannot share memory with rank %d on the same machine, so data travels by datagram: %s",
                    self._rank,
                    peer,
                    wanted.why,
                )
                wanted.warn_at = float("inf")
            with self._lock:
                if wanted.done and self._wanted.get(peer) is wanted:
                    del self._wanted[peer]

    def _connect(self, transport: SharedMemoryTransport, peer: int, card: Card) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(_ANSWER_S)
            connection.connect(_name(card))
            if _user(connection) != os.getuid():
                raise ValueError("a process of another user answers under its name")
            own = transport.cards[self._rank]
            handshake = {"rank": self._rank, "nonce": own.nonce, "to": card.nonce}
            given, wanted = _proofs(transport, peer, card)
            handshake["proof"] = given
            _send(
                connection,
                json.dumps(handshake).encode(),
                transport.endpoint.offer_shared_memory(peer, _neighbours(transport)),
            )
            answer, descriptors = _receive(connection)
            if not hmac.compare_digest(answer, b"yes " + wanted.encode()):
                _close(descriptors)
                raise ValueError(answer.decode(errors="replace") or "it closed the connection")
            _accept_descriptors(transport, peer, descriptors)
            transport.endpoint.use_shared_memory(peer, card.incarnation)
            connection.send(b"use")

    # --- the higher rank answers ------------------------------------------------------------------------------------

    def _serve(self, transport: SharedMemoryTransport) -> None:
        with contextlib.suppress(OSError, RuntimeError, ValueError, KeyError, TypeError, MemoryError):
            connection, _ = self._listener.accept()
            with connection:
                connection.settimeout(_ANSWER_S)
                if _user(connection) != os.getuid():
                    return
                handshake, descriptors = _receive(connection)
                try:
                    peer, incarnation = self._find(transport, json.loads(handshake))
                except BaseException:
                    _close(descriptors)
                    connection.send(b"the peer does not know this process as a rank of its job, or not yet")
                    raise
                _accept_descriptors(transport, peer, descriptors)
                given, _ = _proofs(transport, peer, transport.cards[peer])
                answer = b"yes " + given.encode()
                _send(connection, answer, transport.endpoint.offer_shared_memory(peer, _neighbours(transport)))
                if connection.recv(16) == b"use":
                    transport.endpoint.use_shared_memory(peer, incarnation)

    def _find(self, transport: SharedMemoryTransport, handshake: dict[str, Any]) -> tuple[int, int]:
        peer = int(handshake["rank"])
        card = transport.cards[peer]
        own = transport.cards[self._rank]
        if handshake["nonce"] != card.nonce or handshake["to"] != own.nonce or peer >= self._rank:
            raise ValueError("this is another process")
        _, wanted = _proofs(transport, peer, card)
        if not hmac.compare_digest(str(handshake["proof"]).encode(), wanted.encode()):
            raise ValueError("it does not have the job's key")
        return peer, card.incarnation


class _PendingPeer:
    """A process to which a channel is wanted, and when to try."""

    def __init__(self, card: Card) -> None:
        self.card = card
        self.at = time.monotonic()
        self.warn_at = self.at + _WARN_S
        self.why = ""
        self.done = False
        self._nap_s = _FIRST_NAP_S

    def later(self, why: str) -> None:
        """Schedules the next attempt, with a delay that doubles each time."""
        self.why = why
        self.at = time.monotonic() + self._nap_s
        self._nap_s = min(2 * self._nap_s, _LONGEST_NAP_S if self.at < self.warn_at else _RARE_NAP_S)


def _neighbours(transport: SharedMemoryTransport) -> int:
    """Number of other ranks on this machine, by the cards known now."""
    machine = machine_id()
    return sum(card.machine == machine for card in transport.cards.values()) - 1


def _name(card: Card) -> str:
    # An abstract name: it belongs to the network namespace and disappears with the socket.
    return f"\0stormtorch-{card.nonce}"


def _proofs(transport: SharedMemoryTransport, peer: int, card: Card) -> tuple[str, str]:
    """The proof that this process sends to a peer, and the one that it expects: both show possession of the job's key.

    Without a key, any process that knows the cards can compute them.
    """
    own = transport.cards[transport.rank]
    keys = transport.keys_of(peer, card, 0)
    pairs = ((keys[:16], own, card), (keys[16:], card, own))
    given, wanted = (hmac.new(key, f"share {a.nonce} {b.nonce}".encode(), hashlib.sha256) for key, a, b in pairs)
    return given.hexdigest(), wanted.hexdigest()


def _user(connection: socket.socket) -> int:
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(user)


def _accept_descriptors(transport: SharedMemoryTransport, peer: int, descriptors: list[int]) -> None:
    # For each lane: ring, doorbell and broadcast buffer. The engine owns them from now on, even if the call fails.
    transport.endpoint.accept_shared_memory(peer, descriptors)


def _send(connection: socket.socket, message: bytes, descriptors: list[int]) -> None:
    try:
        socket.send_fds(connection, [message], descriptors)
    finally:
        _close(descriptors)


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    ancillary_bytes = socket.CMSG_LEN(3 * (MOST_LANES + 1) * array.array("i").itemsize)
    message, ancillary, flags, _ = connection.recvmsg(_MOST_BYTES, ancillary_bytes, socket.MSG_CMSG_CLOEXEC)
    found = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    if flags & socket.MSG_CTRUNC:
        _close(list(found))
        raise ValueError("not all descriptors arrived: raise `ulimit -n`")
    return message, list(found)


def _close(descriptors: list[int]) -> None:
    for each in descriptors:
        os.close(each)


_all: weakref.WeakSet[SharedMemorySetup] = weakref.WeakSet()


def _in_child() -> None:
    for each in list(_all):
        each.close_sockets()
    _all.clear()


# A forked process lacks the thread, and must not keep the socket's name.
os.register_at_fork(after_in_child=_in_child)


@atexit.register
def _end() -> None:
    """Ends all threads: none may be inside the engine while the interpreter shuts down."""
    for each in list(_all):
        each.close()

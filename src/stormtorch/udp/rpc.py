"""RPC over TCP between a process outside the job (a join client or a watcher) and a rank: one request, one response.

Handshake: the rank sends a nonce; the client sends its own nonce and then the request; the rank responds and closes.
With a job key, request and response carry an HMAC under a key derived from the job key and both nonces: this
authenticates both sides and every byte. Without a key, any process that reaches the port may send requests, just as
any that reaches the store may read it. Bytes and time of a connection are bounded.

A client on the same machine may instead send the plain line STATUS, as by `echo STATUS | nc 127.0.0.1 PORT`. It
receives a few lines of text if the job has no key, or if the rank has STORM_STATUS=1.
"""

import contextlib
import hashlib
import hmac
import ipaddress
import json
import logging
import os
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from stormtorch.errors import NotAdmitted

_log = logging.getLogger("stormtorch")

PROTOCOL = 1
"""Version of this protocol; both sides must have the same."""
RPC_TIMEOUT_S = 5.0
"""Longest time of one RPC, on either side."""
_MOST_CONNECTIONS = 8
_REQUEST_BYTES = 4 << 10
_RESPONSE_BYTES = 512 << 10  # the cards of a thousand ranks
_MAC_BYTES = 32
_HEAD = struct.Struct("!BI")  # whether the frame is signed, and the bytes that follow
STATUS_VARIABLE = "STORM_STATUS"
"""Environment variable: 1 answers STATUS to any process on the same machine, even if the job has a key."""
_STATUS = b"STATUS"
# Delay of the handshake towards a client on the same machine: one that wants STATUS sends it at once.
_HANDSHAKE_DELAY_S = 0.02

Answer = Callable[[dict[str, Any]], dict[str, Any] | bytes]

_listeners: weakref.WeakSet["RpcServer"] = weakref.WeakSet()


class MalformedMessage(Exception):
    """The bytes received are no message of this protocol."""


class _StatusRequested(Exception):
    """The client sent STATUS after the handshake had begun."""


class _RpcConnection:
    """One side of an RPC over a connected socket."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        self._connection = connection
        self._give_up_at = time.monotonic() + timeout_s
        self._key: bytes | None = None

    def sign(self, key: bytes | None, theirs: str, ours: str) -> None:
        """Signs and verifies all further frames, if there is a key."""
        if key is not None:
            self._key = hmac.new(key, f"reception {theirs} {ours}".encode(), hashlib.sha256).digest()

    def send(self, what: dict[str, Any] | bytes, who: bytes, *, plain: bool = False) -> None:
        """Sends a frame. Its HMAC covers `who`, the sending side, so that no frame can be reflected to its sender."""
        body = what if isinstance(what, bytes) else _encode(what)
        signed = self._key is not None and not plain
        mac = self._mac(who, body) if signed else b""
        self._allow()
        self._connection.sendall(_HEAD.pack(signed, len(mac) + len(body)) + mac + body)

    def receive(self, who: bytes, most_bytes: int) -> dict[str, Any]:
        """Receives a frame of the other side and decodes it."""
        return _decode(self.receive_bytes(who, most_bytes))

    def receive_bytes(self, who: bytes, most_bytes: int) -> bytes:
        """Receives a frame of the other side as bytes, which may be no JSON."""
        head = self._take(_HEAD.size)
        if who == b"newcomer" and head == _STATUS[: _HEAD.size]:
            raise _StatusRequested
        signed, length = _HEAD.unpack(head)
        if length > most_bytes + _MAC_BYTES:
            raise MalformedMessage(f"a frame of {length} bytes")
        body = self._take(length)
        if self._key is not None:
            mac, body = body[:_MAC_BYTES], body[_MAC_BYTES:]
            if not signed or not hmac.compare_digest(mac, self._mac(who, body)):
                raise PermissionError("the other side has another key")
        elif signed:
            raise MalformedMessage("a signed frame, but this side has no key")
        return body

    def _mac(self, who: bytes, body: bytes) -> bytes:
        assert self._key is not None
        return hmac.new(self._key, who + body, hashlib.sha256).digest()

    def _take(self, length: int) -> bytes:
        received = bytearray()
        while len(received) < length:
            self._allow()
            piece = self._connection.recv(min(length - len(received), 1 << 16))
            if not piece:
                raise MalformedMessage(f"the connection ended after {len(received)} of {length} bytes")
            received += piece
        return bytes(received)

    def _allow(self) -> None:
        left_s = self._give_up_at - time.monotonic()
        if left_s <= 0.0:
            raise TimeoutError("the exchange of messages took too long")
        self._connection.settimeout(left_s)


def _encode(what: dict[str, Any]) -> bytes:
    return json.dumps(what, separators=(",", ":")).encode()


def with_records(what: dict[str, Any], lines: list[bytes]) -> bytes:
    """Encodes an answer with records that are JSON already, which saves the training from parsing its own lines."""
    return b'%s,"records":[%s]}' % (_encode(what)[:-1], b",".join(lines))


def _decode(body: bytes) -> dict[str, Any]:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MalformedMessage("a frame that is no JSON") from error
    if not isinstance(message, dict):
        raise MalformedMessage("a frame that is no object")
    return message


def request(
    address: tuple[str, int],
    request: dict[str, Any],
    *,
    key: bytes | None,
    version: str,
    timeout_s: float = RPC_TIMEOUT_S,
) -> dict[str, Any]:
    """Sends a request to a rank's admission port, and returns the decoded response: see `request_bytes`."""
    return _decode(request_bytes(address, request, key=key, version=version, timeout_s=timeout_s))


def request_bytes(
    address: tuple[str, int],
    request: dict[str, Any],
    *,
    key: bytes | None,
    version: str,
    timeout_s: float = RPC_TIMEOUT_S,
) -> bytes:
    """Sends a request to a rank's admission port, and returns the response undecoded, ready to be forwarded.

    Args:
        address: The rank's admission port.
        request: The request.
        key: The job's key.
        version: Version of this package.
        timeout_s: Longest time to connect, and then again for the RPC.

    Raises:
        OSError: No process answers there, or not in time.
        MalformedMessage: Something other than a rank answers there.
        NotAdmitted: The rank refuses this process; the error says why.
    """
    where = f"{address[0]}:{address[1]}"
    with socket.create_connection(address, timeout=timeout_s) as connection:
        talk = _RpcConnection(connection, timeout_s)
        handshake = talk.receive(b"rank", _REQUEST_BYTES)
        if handshake.get("storm") != PROTOCOL or handshake.get("version") != version:
            raise NotAdmitted(
                f"the job at {where} runs stormtorch {handshake.get('version')!s:.20}, and this process {version}: "
                "install the same version"
            )
        if bool(handshake.get("keyed")) != (key is not None):
            has, gives = ("no key", "has one") if key is not None else ("a key", "has none")
            raise NotAdmitted(
                f"the job at {where} has {has}, and this process {gives}: `key` must be the same on every rank"
            )
        ours, theirs = secrets.token_hex(16), str(handshake.get("nonce"))
        talk.send({"nonce": ours}, b"newcomer")
        talk.sign(key, theirs, ours)
        talk.send(request, b"newcomer")
        try:
            return talk.receive_bytes(b"rank", _RESPONSE_BYTES)
        except PermissionError:
            raise NotAdmitted(
                f"the job at {where} has another key than this process: `key` must be the same on every rank"
            ) from None


class RpcServer:
    """Serves RPCs on a TCP port, in threads.

    Input is untrusted and never raises into the job: `rejected` counts the connections that failed.

    Args:
        host: Numeric address to listen on.
        port: Port to listen on if it is free; otherwise the kernel chooses one.
        key: The job's key.
        version: Version of this package.
        answer: Handles a request; called in the server's threads.
    """

    def __init__(self, host: str, port: int, *, key: bytes | None, version: str, answer: Answer) -> None:
        self.answer = answer
        self.status: Callable[[], str] | None = None
        """Returns this rank's status as text; None refuses STATUS."""
        self.rejected = 0
        self._key, self._version = key, version
        self._seats = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        self._socket = _listen(host, port)
        self.port = int(self._socket.getsockname()[1])
        _listeners.add(self)
        self._end = weakref.finalize(self, _stop, self._socket, os.getpid())
        # A weak reference: otherwise the thread would keep the server, and its port, alive for ever.
        threading.Thread(target=_accept, args=(weakref.ref(self), self._socket), name="reception", daemon=True).start()

    def close(self) -> None:
        """Stops listening; connections under way end by themselves."""
        _listeners.discard(self)
        self._end()

    def receive(self, connection: socket.socket) -> None:
        """Serves a connection in a thread of its own; closes it if too many are open."""
        if not self._seats.acquire(blocking=False):
            self.rejected += 1
            connection.close()
            return
        try:
            threading.Thread(target=self._serve, args=(connection,), name="reception talk", daemon=True).start()
        except RuntimeError:  # no more threads
            self._seats.release()
            connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                if self._requests_status(connection):
                    self._send_status(connection)
                    return
                talk = _RpcConnection(connection, RPC_TIMEOUT_S)
                nonce = secrets.token_hex(16)
                keyed = self._key is not None
                talk.send({"storm": PROTOCOL, "version": self._version, "nonce": nonce, "keyed": keyed}, b"rank")
                try:
                    theirs = talk.receive(b"newcomer", _REQUEST_BYTES).get("nonce")
                except _StatusRequested:
                    self._send_status(connection, after="\n")  # the handshake does not end its line
                    return
                talk.sign(self._key, nonce, str(theirs))
                try:
                    request = talk.receive(b"newcomer", _REQUEST_BYTES)
                except PermissionError:
                    self.rejected += 1
                    talk.send({"refused": "key"}, b"rank", plain=True)
                    return
                talk.send(self.answer(request), b"rank")
        except (MalformedMessage, OSError):
            self.rejected += 1
        except Exception:
            self.rejected += 1
            _log.debug("admission port: a request failed", exc_info=True)
        finally:
            self._seats.release()

    def _may_send_status(self, connection: socket.socket) -> bool:
        allowed = self._key is None or os.environ.get(STATUS_VARIABLE) == "1"
        return allowed and self.status is not None and _is_local(connection)

    def _requests_status(self, connection: socket.socket) -> bool:
        """Whether a client on this machine has sent STATUS before the handshake."""
        if not self._may_send_status(connection):
            return False
        connection.settimeout(_HANDSHAKE_DELAY_S)
        try:
            return connection.recv(len(_STATUS), socket.MSG_PEEK) == _STATUS
        except TimeoutError:
            return False

    def _send_status(self, connection: socket.socket, after: str = "") -> None:
        if self.status is None or not self._may_send_status(connection):
            raise MalformedMessage("a request for the status from another machine")
        connection.settimeout(RPC_TIMEOUT_S)
        connection.recv(64)  # a connection that is closed with bytes unread loses those that it has sent
        connection.sendall((after + self.status()).encode())


def _is_local(connection: socket.socket) -> bool:
    """Whether the other end of a connection is on this machine."""
    there, here = (str(name[0]).partition("%")[0] for name in (connection.getpeername(), connection.getsockname()))
    return there == here or ipaddress.ip_address(there).is_loopback


def _listen(host: str, port: int) -> socket.socket:
    family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    for wanted in (address, (address[0], 0, *address[2:])):
        listening = socket.socket(family, kind, number)
        try:
            # A restarted process gets its port at once.
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(wanted)
            listening.listen(_MOST_CONNECTIONS)
        except OSError:
            listening.close()
            if wanted[1] == 0:
                raise
        else:
            return listening
    raise AssertionError("the kernel always finds a port")


def _stop(listening: socket.socket, owner: int) -> None:
    if os.getpid() == owner:  # a forked process must not stop its parent's server
        with contextlib.suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
    listening.close()


def _accept(found: "weakref.ref[RpcServer]", listening: socket.socket) -> None:
    while True:
        try:
            connection, _ = listening.accept()
        except OSError:
            if listening.fileno() < 0 or found() is None or not _is_listening(listening):
                return
            time.sleep(0.1)  # out of descriptors: others may close some
            continue
        listener = found()
        if listener is None:
            connection.close()
            return
        listener.receive(connection)
        del listener


def _is_listening(listening: socket.socket) -> bool:
    try:
        return bool(listening.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:
        return False


def _forget_in_child() -> None:
    """Closes the servers that a forked process has inherited: it has none of their threads and is not in the job."""
    for listener in list(_listeners):
        listener.close()


os.register_at_fork(after_in_child=_forget_in_child)

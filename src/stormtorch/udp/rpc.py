"""Short talks over TCP between a process that wants into a job and a rank of it: bounded in bytes and in time.

The rank greets with a random number. The newcomer answers with one of its own and asks its question; the rank answers
it, and the talk is over. Where the job has a key, question and answer carry an HMAC under a key that follows from the
job key and both numbers: each side knows that the other has the key, and nobody between them changes a byte. Without a
key, whoever reaches the port can ask, just as whoever reaches the store can read.

Somebody on the same machine may also send the plain line STATUS, as by `echo STATUS | nc 127.0.0.1 PORT`, and gets a
few lines of text: where the job has no key, or the rank has STORM_STATUS=1.
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
"""Number of this way to talk; both sides must have the same."""
TALK_S = 5.0
"""Longest time of a talk, on either side."""
_MOST_TALKS = 8
_QUESTION_BYTES = 4 << 10
_ANSWER_BYTES = 512 << 10  # the cards of a thousand ranks
_MAC_BYTES = 32
_HEAD = struct.Struct("!BI")  # whether the frame is signed, and the bytes that follow
STATUS_VARIABLE = "STORM_STATUS"
"""Environment variable: 1 answers STATUS in a job that has a key, too, to everybody on the same machine."""
_STATUS = b"STATUS"
# Time for which a rank waits before it greets somebody on its own machine: whoever asks for STATUS says so at once.
_GREET_AFTER_S = 0.02

Answer = Callable[[dict[str, Any]], dict[str, Any] | bytes]

_listeners: weakref.WeakSet["Listener"] = weakref.WeakSet()


class Garbage(Exception):
    """What came over a connection is not part of such a talk."""


class _AsksStatus(Exception):
    """The other side has typed STATUS after it was greeted."""


class _Talk:
    """One side of a talk over a connected socket."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        self._connection = connection
        self._give_up_at = time.monotonic() + timeout_s
        self._key: bytes | None = None

    def sign(self, key: bytes | None, theirs: str, ours: str) -> None:
        """Signs and checks all further frames, if there is a key."""
        if key is not None:
            self._key = hmac.new(key, f"reception {theirs} {ours}".encode(), hashlib.sha256).digest()

    def say(self, what: dict[str, Any] | bytes, who: bytes, *, plain: bool = False) -> None:
        """Sends a frame. `who` says which side speaks, so that no frame can be sent back to its sender."""
        body = what if isinstance(what, bytes) else _written(what)
        signed = self._key is not None and not plain
        mac = self._mac(who, body) if signed else b""
        self._allow()
        self._connection.sendall(_HEAD.pack(signed, len(mac) + len(body)) + mac + body)

    def hear(self, who: bytes, most_bytes: int) -> dict[str, Any]:
        """Receives a frame of the other side."""
        return _parsed(self.hear_text(who, most_bytes))

    def hear_text(self, who: bytes, most_bytes: int) -> bytes:
        """Receives a frame of the other side as it is: it may be no JSON."""
        head = self._take(_HEAD.size)
        if who == b"newcomer" and head == _STATUS[: _HEAD.size]:
            raise _AsksStatus
        signed, length = _HEAD.unpack(head)
        if length > most_bytes + _MAC_BYTES:
            raise Garbage(f"a frame of {length} bytes")
        body = self._take(length)
        if self._key is not None:
            mac, body = body[:_MAC_BYTES], body[_MAC_BYTES:]
            if not signed or not hmac.compare_digest(mac, self._mac(who, body)):
                raise PermissionError("the other side has another key")
        elif signed:
            raise Garbage("a signed frame in a talk without a key")
        return body

    def _mac(self, who: bytes, body: bytes) -> bytes:
        assert self._key is not None
        return hmac.new(self._key, who + body, hashlib.sha256).digest()

    def _take(self, length: int) -> bytes:
        came = bytearray()
        while len(came) < length:
            self._allow()
            piece = self._connection.recv(min(length - len(came), 1 << 16))
            if not piece:
                raise Garbage(f"the connection ended after {len(came)} of {length} bytes")
            came += piece
        return bytes(came)

    def _allow(self) -> None:
        left_s = self._give_up_at - time.monotonic()
        if left_s <= 0.0:
            raise TimeoutError("the talk took too long")
        self._connection.settimeout(left_s)


def _written(what: dict[str, Any]) -> bytes:
    return json.dumps(what, separators=(",", ":")).encode()


def with_records(what: dict[str, Any], lines: list[bytes]) -> bytes:
    """Returns an answer as JSON, with records that are JSON already: a training does not read its own lines again."""
    return b'%s,"records":[%s]}' % (_written(what)[:-1], b",".join(lines))


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        said = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Garbage("a frame that is no JSON") from error
    if not isinstance(said, dict):
        raise Garbage("a frame that is no object")
    return said


def ask(
    address: tuple[str, int], question: dict[str, Any], *, key: bytes | None, version: str, timeout_s: float = TALK_S
) -> dict[str, Any]:
    """Asks the reception at an address one question, and returns its answer: see `ask_text`."""
    return _parsed(ask_text(address, question, key=key, version=version, timeout_s=timeout_s))


def ask_text(
    address: tuple[str, int], question: dict[str, Any], *, key: bytes | None, version: str, timeout_s: float = TALK_S
) -> bytes:
    """Asks the reception at an address one question, and returns its answer as it came, to be passed on.

    Args:
        address: Where the reception listens.
        question: What to ask.
        key: The job's key.
        version: Version of this package.
        timeout_s: Longest time to connect, and then to talk.

    Raises:
        OSError: Nobody answers there, or not in time.
        Garbage: Something else than a reception answers there.
        NotAdmitted: The reception refuses to talk with this process; the error says why.
    """
    where = f"{address[0]}:{address[1]}"
    with socket.create_connection(address, timeout=timeout_s) as connection:
        talk = _Talk(connection, timeout_s)
        greeting = talk.hear(b"rank", _QUESTION_BYTES)
        if greeting.get("storm") != PROTOCOL or greeting.get("version") != version:
            raise NotAdmitted(
                f"the job at {where} runs stormtorch {greeting.get('version')!s:.20}, and this process {version}: "
                "install the same version"
            )
        if bool(greeting.get("keyed")) != (key is not None):
            has, gives = ("no key", "has one") if key is not None else ("a key", "has none")
            raise NotAdmitted(
                f"the job at {where} has {has}, and this process {gives}: `key` must be the same on every rank"
            )
        ours, theirs = secrets.token_hex(16), str(greeting.get("nonce"))
        talk.say({"nonce": ours}, b"newcomer")
        talk.sign(key, theirs, ours)
        talk.say(question, b"newcomer")
        try:
            return talk.hear_text(b"rank", _ANSWER_BYTES)
        except PermissionError:
            raise NotAdmitted(
                f"the job at {where} has another key than this process: `key` must be the same on every rank"
            ) from None


class Listener:
    """Listens on a TCP port of its own, and has a callable answer what newcomers ask.

    Bytes of strangers raise nothing into the job: `rejected` counts the talks that came to nothing.

    Args:
        host: Numeric address to listen on, and no other.
        port: Port to listen on if it is free; otherwise the kernel chooses one.
        key: The job's key.
        version: Version of this package.
        answer: Answers a question; it is called in threads of the listener.
    """

    def __init__(self, host: str, port: int, *, key: bytes | None, version: str, answer: Answer) -> None:
        self.answer = answer
        self.status: Callable[[], str] | None = None
        """Says where this rank stands; None says nothing."""
        self.rejected = 0
        self._key, self._version = key, version
        self._seats = threading.BoundedSemaphore(_MOST_TALKS)
        self._socket = _listen(host, port)
        self.port = int(self._socket.getsockname()[1])
        _listeners.add(self)
        self._end = weakref.finalize(self, _stop, self._socket, os.getpid())
        # A thread that knew the listener would keep it, and with it the port, although nobody else needs it.
        threading.Thread(target=_accept, args=(weakref.ref(self), self._socket), name="reception", daemon=True).start()

    def close(self) -> None:
        """Stops to listen; talks under way end by themselves."""
        _listeners.discard(self)
        self._end()

    def receive(self, connection: socket.socket) -> None:
        """Talks with a newcomer in a thread of its own, unless too many are being talked with."""
        if not self._seats.acquire(blocking=False):
            self.rejected += 1
            connection.close()
            return
        try:
            threading.Thread(target=self._talk, args=(connection,), name="reception talk", daemon=True).start()
        except RuntimeError:  # no more threads
            self._seats.release()
            connection.close()

    def _talk(self, connection: socket.socket) -> None:
        try:
            with connection:
                if self._asks_status(connection):
                    self._say_status(connection)
                    return
                talk = _Talk(connection, TALK_S)
                nonce = secrets.token_hex(16)
                keyed = self._key is not None
                talk.say({"storm": PROTOCOL, "version": self._version, "nonce": nonce, "keyed": keyed}, b"rank")
                try:
                    theirs = talk.hear(b"newcomer", _QUESTION_BYTES).get("nonce")
                except _AsksStatus:
                    self._say_status(connection, after="\n")  # the greeting is no line
                    return
                talk.sign(self._key, nonce, str(theirs))
                try:
                    question = talk.hear(b"newcomer", _QUESTION_BYTES)
                except PermissionError:
                    self.rejected += 1
                    talk.say({"refused": "key"}, b"rank", plain=True)
                    return
                talk.say(self.answer(question), b"rank")
        except (Garbage, OSError):
            self.rejected += 1
        except Exception:
            self.rejected += 1
            _log.debug("reception: a talk failed", exc_info=True)
        finally:
            self._seats.release()

    def _tells_status(self, connection: socket.socket) -> bool:
        allowed = self._key is None or os.environ.get(STATUS_VARIABLE) == "1"
        return allowed and self.status is not None and _from_here(connection)

    def _asks_status(self, connection: socket.socket) -> bool:
        """Whether somebody on this machine asks for the status, without having been greeted."""
        if not self._tells_status(connection):
            return False
        connection.settimeout(_GREET_AFTER_S)
        try:
            return connection.recv(len(_STATUS), socket.MSG_PEEK) == _STATUS
        except TimeoutError:
            return False

    def _say_status(self, connection: socket.socket, after: str = "") -> None:
        if self.status is None or not self._tells_status(connection):
            raise Garbage("a question for the status from elsewhere")
        connection.settimeout(TALK_S)
        connection.recv(64)  # a connection that is closed with bytes unread loses those that it has sent
        connection.sendall((after + self.status()).encode())


def _from_here(connection: socket.socket) -> bool:
    """Whether the other end of a connection is on this machine."""
    there, here = (str(name[0]).partition("%")[0] for name in (connection.getpeername(), connection.getsockname()))
    return there == here or ipaddress.ip_address(there).is_loopback


def _listen(host: str, port: int) -> socket.socket:
    family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    for wanted in (address, (address[0], 0, *address[2:])):
        listening = socket.socket(family, kind, number)
        try:
            # A process that is started again takes the port at once.
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(wanted)
            listening.listen(_MOST_TALKS)
        except OSError:
            listening.close()
            if wanted[1] == 0:
                raise
        else:
            return listening
    raise AssertionError("the kernel always finds a port")


def _stop(listening: socket.socket, owner: int) -> None:
    if os.getpid() == owner:  # a forked process must not stop its parent
        with contextlib.suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
    listening.close()


def _accept(found: "weakref.ref[Listener]", listening: socket.socket) -> None:
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
    """Closes what a forked process has inherited: it has no thread that would answer, and no part in the job."""
    for listener in list(_listeners):
        listener.close()


os.register_at_fork(after_in_child=_forget_in_child)

"""Layout of the doctor's datagrams. They may come from anyone: what is not ours is None, never an error.

Every datagram begins with a header, in network byte order: a mark, the cookie of this examination, which only its ranks
know, the kind, the sending rank, the number of a train, a number within it, and the sender's clock. No answer is longer
than its question, so that nobody can use a rank to amplify traffic.
"""

import hmac
import ipaddress
import struct
from enum import IntEnum
from typing import NamedTuple

COOKIE_BYTES = 16
_MARK = b"SDoc"
_HEADER = struct.Struct(">4s16sBHIIQ")
HEADER_BYTES = _HEADER.size
"""Bytes of the smallest datagram."""
_ECHO = struct.Struct(">QQH46s")
_TALLY = struct.Struct(">IIdd")
ECHO_BYTES = HEADER_BYTES + _ECHO.size
"""Bytes of an echo, asked or answered."""
TALLY_BYTES = HEADER_BYTES + _TALLY.size
"""Bytes of a tally, asked or answered."""


class Kind(IntEnum):
    """Kinds of datagrams."""

    TRAIN = 0
    """One of a train, which the receiver counts."""
    ECHO_REQUEST = 1
    ECHO_REPLY = 2
    TALLY_REQUEST = 3
    """Asks what has arrived of a train."""
    TALLY_REPLY = 4


class Header(NamedTuple):
    """Beginning of every datagram."""

    kind: Kind
    source: int
    """Rank that sent it."""
    train: int
    number: int
    time_ns: int
    """Sender's clock; in an answer, the asker's."""


class Echo(NamedTuple):
    """Body of an answered echo."""

    received_ns: int
    """Clock of the answering rank when the question came."""
    answered_ns: int
    seen: str
    """Address of the asker, as the answering rank sees it."""
    seen_port: int


class Tally(NamedTuple):
    """Body of an answered tally."""

    arrived: int
    largest: int
    """Bytes of the largest datagram of the train that arrived."""
    bytes_per_s: float
    """Rate at which the fastest stretch of the train arrived; 0 if too little did."""
    sent_per_s: float
    """Bytes per second at which the same stretch was sent, by the sender's clock."""


def pack(cookie: bytes, header: Header, body: bytes = b"", *, size: int = 0) -> bytes:
    """Makes a datagram, padded with zeros to `size` bytes."""
    kind, source, train, number, time_ns = header
    return (_HEADER.pack(_MARK, cookie, kind, source, train, number, time_ns) + body).ljust(size, b"\0")


def unpack(cookie: bytes, datagram: bytes) -> Header | None:
    """Reads the header; None if the datagram is none of this examination."""
    if len(datagram) < HEADER_BYTES:
        return None
    mark, theirs, kind, source, train, number, time_ns = _HEADER.unpack_from(datagram)
    # The cookie is secret: comparing takes as long whatever a stranger sends.
    if mark != _MARK or not hmac.compare_digest(theirs, cookie) or kind >= len(Kind):
        return None
    return Header(Kind(kind), source, train, number, time_ns)


def echo_body(echo: Echo) -> bytes:
    """Packs the answer to an echo."""
    return _ECHO.pack(echo.received_ns, echo.answered_ns, echo.seen_port, echo.seen.encode()[:46])


def read_echo(datagram: bytes) -> Echo | None:
    """Reads the answer to an echo; None if it makes no sense."""
    if len(datagram) < ECHO_BYTES:
        return None
    received_ns, answered_ns, port, seen = _ECHO.unpack_from(datagram, HEADER_BYTES)
    try:
        address = seen.rstrip(b"\0").decode()
        ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None
    return Echo(received_ns, answered_ns, address, port)


def tally_body(tally: Tally) -> bytes:
    """Packs the answer to a tally."""
    return _TALLY.pack(*tally)


def read_tally(datagram: bytes) -> Tally | None:
    """Reads the answer to a tally; None if it makes no sense."""
    if len(datagram) < TALLY_BYTES:
        return None
    tally = Tally(*_TALLY.unpack_from(datagram, HEADER_BYTES))
    return tally if all(0.0 <= rate < 1e12 for rate in (tally.bytes_per_s, tally.sent_per_s)) else None

"""Wire format of the doctor's datagrams. They may come from anyone: a foreign one parses as None, never as an error.

Every datagram begins with a header, in network byte order: a mark, the cookie of this examination, which only its ranks
know, the kind, the sending rank, the number of a train, a number within it, and the sender's clock. No answer is longer
than its request, so that a rank cannot be used to amplify traffic.
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
"""Bytes of an echo request or reply."""
TALLY_BYTES = HEADER_BYTES + _TALLY.size
"""Bytes of a tally request or reply."""


class Kind(IntEnum):
    """Kinds of datagrams."""

    TRAIN = 0
    """Part of a packet train; the receiver counts it."""
    ECHO_REQUEST = 1
    ECHO_REPLY = 2
    TALLY_REQUEST = 3
    """Requests how much of a train has arrived."""
    TALLY_REPLY = 4


class Header(NamedTuple):
    """Beginning of every datagram."""

    kind: Kind
    source: int
    """Rank that sent it."""
    train: int
    number: int
    time_ns: int
    """Sender's clock; in a reply, that of the request."""


class Echo(NamedTuple):
    """Body of an echo reply."""

    received_ns: int
    """Clock of the replying rank when the request arrived."""
    answered_ns: int
    seen: str
    """Address of the requesting rank, as the replying rank sees it."""
    seen_port: int


class Tally(NamedTuple):
    """Body of a tally reply."""

    arrived: int
    largest: int
    """Bytes of the largest datagram of the train that arrived."""
    bytes_per_s: float
    """Rate of the fastest stretch of the train; 0 if too little arrived."""
    sent_per_s: float
    """Bytes per second at which the same stretch was sent, by the sender's clock."""


def pack(cookie: bytes, header: Header, body: bytes = b"", *, size: int = 0) -> bytes:
    """Makes a datagram, padded with zeros to `size` bytes."""
    kind, source, train, number, time_ns = header
    return (_HEADER.pack(_MARK, cookie, kind, source, train, number, time_ns) + body).ljust(size, b"\0")


def unpack(cookie: bytes, datagram: bytes) -> Header | None:
    """Reads the header; None if the datagram does not belong to this examination."""
    if len(datagram) < HEADER_BYTES:
        return None
    mark, theirs, kind, source, train, number, time_ns = _HEADER.unpack_from(datagram)
    # The cookie is secret: compare in constant time.
    if mark != _MARK or not hmac.compare_digest(theirs, cookie) or kind >= len(Kind):
        return None
    return Header(Kind(kind), source, train, number, time_ns)


def echo_body(echo: Echo) -> bytes:
    """Packs an echo reply."""
    return _ECHO.pack(echo.received_ns, echo.answered_ns, echo.seen_port, echo.seen.encode()[:46])


def read_echo(datagram: bytes) -> Echo | None:
    """Reads an echo reply; None if it is malformed."""
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
    """Packs a tally reply."""
    return _TALLY.pack(*tally)


def read_tally(datagram: bytes) -> Tally | None:
    """Reads a tally reply; None if it is malformed."""
    if len(datagram) < TALLY_BYTES:
        return None
    tally = Tally(*_TALLY.unpack_from(datagram, HEADER_BYTES))
    return tally if all(0.0 <= rate < 1e12 for rate in (tally.bytes_per_s, tally.sent_per_s)) else None

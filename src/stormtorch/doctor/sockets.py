"""UDP sockets of the doctor: opened as the engine opens its own, so that the same limits apply."""

import contextlib
import socket
import struct
from typing import NamedTuple

REQUESTED_BUFFER_BYTES = 8 << 20
"""Receive buffer that `Options` requests by default."""
SEND_BUFFER_BYTES = 4 << 20
MOST_PAYLOAD = 65507
"""Bytes of the largest datagram over IPv4."""
UDP_SEGMENT = 103
UDP_GRO = 104
# Missing in Python's socket module; values from the kernel's headers, the same on x86-64 and ARM.
SO_TIMESTAMPNS = 35
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
_SO_MEMINFO = 55
_DROPS_AT = 8
_MEMINFO = struct.Struct("9I")
_IP_MTU_DISCOVER, _IPV6_MTU_DISCOVER, _PMTUDISC_PROBE = 10, 23, 3


class Buffers(NamedTuple):
    """Buffers that the kernel granted, in bytes of payload: the kernel doubles them for its own overhead."""

    receive: int
    send: int


def open_udp(host: str, port: int, receive_bytes: int = REQUESTED_BUFFER_BYTES) -> socket.socket:
    """Opens a UDP socket with kernel receive timestamps and without IP fragmentation.

    Raises:
        OSError: The address does not belong to this machine, or the port is taken.
    """
    opened = socket.socket(family_of(host), socket.SOCK_DGRAM)
    try:
        set_buffers(opened, receive_bytes, SEND_BUFFER_BYTES)
        opened.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        # Packets larger than the path MTU must be lost, not fragmented: their loss is what is measured.
        if opened.family == socket.AF_INET6:
            opened.setsockopt(socket.IPPROTO_IPV6, _IPV6_MTU_DISCOVER, _PMTUDISC_PROBE)
        else:
            opened.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _PMTUDISC_PROBE)
        opened.bind(socket_address(host, port))
    except BaseException:
        opened.close()
        raise
    return opened


def set_buffers(opened: socket.socket, receive_bytes: int, send_bytes: int) -> None:
    """Requests socket buffers as the engine does: beyond the system limits if this process is allowed to."""
    for force, plain, size in (
        (_SO_RCVBUFFORCE, socket.SO_RCVBUF, receive_bytes),
        (_SO_SNDBUFFORCE, socket.SO_SNDBUF, send_bytes),
    ):
        try:
            opened.setsockopt(socket.SOL_SOCKET, force, size)
        except OSError:
            opened.setsockopt(socket.SOL_SOCKET, plain, size)


def granted(opened: socket.socket) -> Buffers:
    """Buffers that the kernel granted to a socket."""
    receive, send = (opened.getsockopt(socket.SOL_SOCKET, each) // 2 for each in (socket.SO_RCVBUF, socket.SO_SNDBUF))
    return Buffers(receive, send)


def dropped(opened: socket.socket) -> int:
    """Datagrams that the kernel dropped because the socket's receive buffer was full; 0 if it does not report them."""
    with contextlib.suppress(OSError, struct.error):
        values = _MEMINFO.unpack_from(opened.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, 64))
        return int(values[_DROPS_AT])
    return 0


def family_of(host: str) -> socket.AddressFamily:
    """Address family of a numeric address."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def socket_address(host: str, port: int) -> tuple[object, ...]:
    """Address in the form that sockets of its family accept; a link-local one keeps its interface."""
    flags = socket.AI_NUMERICHOST
    return socket.getaddrinfo(host, port, family_of(host), socket.SOCK_DGRAM, flags=flags)[0][4]


def header_bytes(host: str) -> int:
    """Bytes of the IP and UDP headers before a datagram."""
    return 48 if ":" in host else 28

"""Finds, configures and cuts TCP connections of other libraries in this process: gloo does not expose its sockets."""

import contextlib
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

Opened = TypeVar("Opened")

_NAME_BYTES = 16


@dataclass(frozen=True)
class Stream:
    """A TCP connection of this process."""

    descriptor: int
    identity: str
    """Identity of the socket, as a descriptor may be reused."""

    def _open(self) -> socket.socket | None:
        try:
            if os.readlink(f"/proc/self/fd/{self.descriptor}") == self.identity:
                return socket.socket(fileno=os.dup(self.descriptor))
        except OSError:
            pass
        return None

    def congestion_control(self) -> str:
        """Congestion control in use by the kernel; empty if closed."""
        stream = self._open()
        if stream is None:
            return ""
        with stream:
            return stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES).rstrip(b"\0").decode()

    def choose(self, congestion_control: str) -> None:
        """Sets the congestion control of the connection.

        Not by net.ipv4.tcp_congestion_control: in a network namespace, that takes only what
        tcp_allowed_congestion_control of the machine lists, even for root.
        """
        stream = self._open()
        if stream is not None:
            with stream:
                stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion_control.encode())

    def mark(self, dscp: int) -> None:
        """Sets the DSCP of its packets."""
        stream = self._open()
        if stream is not None:
            with stream:
                stream.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, dscp << 2)

    def abort(self) -> None:
        """Aborts it and discards unsent and unread data."""
        stream = self._open()
        if stream is not None:
            with stream, contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)


def streams() -> set[Stream]:
    """Finds all connected TCP sockets of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            identity = os.readlink(f"/proc/self/fd/{name}")
            if not identity.startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as stream:
                if stream.type == socket.SOCK_STREAM and stream.family in (socket.AF_INET, socket.AF_INET6):
                    stream.getpeername()  # fails if not connected
                    found.add(Stream(int(name), identity))
    return found


@dataclass(frozen=True)
class Connections:
    """Connections that one group has opened."""

    streams: frozenset[Stream]
    congestion_control: str
    """Congestion control, as reported by the kernel."""

    def abort(self) -> None:
        """Cuts them: an aborted call would otherwise go on and disturb others."""
        for stream in self.streams:
            stream.abort()


def opened_by(connect: Callable[[], Opened], congestion_control: str | None) -> tuple[Opened, Connections]:
    """Calls `connect`; returns its result and its new connections, set to that congestion control.

    None leaves the system's.

    Raises:
        RuntimeError: The kernel uses another congestion control.
    """
    before = streams()
    opened = connect()
    made = frozenset(streams() - before)
    if congestion_control is not None:
        for stream in made:
            stream.choose(congestion_control)
    found = {stream.congestion_control() for stream in made}
    text = "/".join(sorted(found))
    if congestion_control is not None and found != {congestion_control}:
        raise RuntimeError(f"TCP has congestion control {text or 'unknown'}, not {congestion_control}")
    return opened, Connections(made, text)

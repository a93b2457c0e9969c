"""TCP connections that belong to somebody else in this process: gloo opens them, and shows none of its sockets."""

import contextlib
import os
import socket
from dataclasses import dataclass

_NAME_BYTES = 16


@dataclass(frozen=True)
class Stream:
    """A TCP connection of this process."""

    descriptor: int
    identity: str
    """Of the socket; a descriptor may be closed and used again."""

    def _open(self) -> socket.socket | None:
        try:
            if os.readlink(f"/proc/self/fd/{self.descriptor}") == self.identity:
                return socket.socket(fileno=os.dup(self.descriptor))
        except OSError:
            pass
        return None

    def congestion_control(self) -> str:
        """What the kernel uses for it; nothing if it is closed."""
        stream = self._open()
        if stream is None:
            return ""
        with stream:
            return stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES).rstrip(b"\0").decode()

    def choose(self, congestion_control: str) -> None:
        """Sends with that one from now on.

        Not by net.ipv4.tcp_congestion_control: in a network namespace, that takes only what
        tcp_allowed_congestion_control of the machine lists, even for root.
        """
        stream = self._open()
        if stream is not None:
            with stream:
                stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion_control.encode())

    def cut(self) -> None:
        """Ends it, whatever is still to be sent or read."""
        stream = self._open()
        if stream is not None:
            with stream, contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)


def streams() -> set[Stream]:
    """All that are connected."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            identity = os.readlink(f"/proc/self/fd/{name}")
            if not identity.startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as stream:
                if stream.type == socket.SOCK_STREAM and stream.family in (socket.AF_INET, socket.AF_INET6):
                    stream.getpeername()  # fails where nobody is at the other end
                    found.add(Stream(int(name), identity))
    return found

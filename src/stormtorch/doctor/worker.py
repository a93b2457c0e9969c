"""Worker of an examination: reports its rank's settings, then serves the director's requests until the last one."""

import contextlib
import importlib.util
import os
import platform
import re
import socket
import threading
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from stormtorch._engine import interface_mtu
from stormtorch.doctor.probe import TCP_BANNER, Peer, Prober
from stormtorch.doctor.receiver import Receiver
from stormtorch.doctor.sockets import (
    MOST_PAYLOAD,
    REQUESTED_BUFFER_BYTES,
    dropped,
    family_of,
    granted,
    header_bytes,
    open_udp,
    socket_address,
)
from stormtorch.udp.addresses import local_address

INTERFACE_VARIABLE = "STORM_SOCKET_IFNAME"
"""Environment variable that names the interface to use; the backend reads it too."""


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """Settings of one worker."""

    rank: int
    interface: str | None = None
    """Name or address of the interface; None takes it from `STORM_SOCKET_IFNAME`, the ssh connection, or the route to
    the other ranks."""
    towards: str | None = None
    """Host whose route determines the interface if nothing else does."""
    port: int = 0
    """UDP port; 0 lets the kernel choose."""
    receive_buffer_bytes: int = REQUESTED_BUFFER_BYTES


class WorkerChannel(Protocol):
    """Worker's end of the channel to the director."""

    def receive(self) -> dict[str, Any] | None:
        """Waits for the next request; None if there will be none."""
        ...

    def answer(self, message: dict[str, Any]) -> None:
        """Answers the last request."""
        ...


def run_worker(orders: WorkerChannel, settings: WorkerSettings) -> None:
    """Serves an examination until its end."""
    try:
        here = own_address(settings)
        opened = open_udp(here, settings.port, settings.receive_buffer_bytes)
    except (OSError, ValueError) as error:
        orders.answer({"rank": settings.rank, "host": socket.gethostname(), "failed": _why(error, settings)})
        return
    with opened, _TcpResponder(here) as tcp_port:
        orders.answer(_self_report(settings, here, opened, tcp_port))
        begun = orders.receive()
        if begun is None or begun["order"] != "begin":
            return
        cookie, world = bytes.fromhex(begun["cookie"]), int(begun["world"])
        receiver = Receiver(opened, cookie, settings.rank, world)
        try:
            _serve_requests(orders, Prober(opened, receiver, cookie, settings.rank, _mtu(here)), receiver, opened)
        finally:
            receiver.close()


def _serve_requests(orders: WorkerChannel, prober: Prober, receiver: Receiver, opened: socket.socket) -> None:
    drops = 0
    while (order := orders.receive()) is not None:
        match order["order"]:
            case "ask":
                drops = dropped(opened)
                orders.answer(prober.probe(Peer(**order["peer"]), float(order["seconds"])).to_json())
            case "report":
                peer, train = int(order["peer"]), receiver.train(int(order["peer"]), int(order["train"]))
                orders.answer(
                    {
                        "heard": receiver.received(peer),
                        "lost": train.lost(int(order["sent"])),
                        "duplicates": train.duplicates,
                        "reordered": train.reordered,
                        "overflowed": dropped(opened) - drops,
                        "overflowed_steady": dropped(opened) - train.dropped_before if train.numbers else 0,
                        "strangers": receiver.unknown_senders,
                    }
                )
            case _:
                return


def own_address(settings: WorkerSettings) -> str:
    """Address that this rank uses, from the most reliable source.

    Raises:
        ValueError: The interface does not exist or has no address.
        OSError: The host of `towards` is unknown.
    """
    named = settings.interface or os.environ.get(INTERFACE_VARIABLE)
    if named:
        return local_address(named)
    if settings.towards is None:
        # Used only without `towards`: a launched rank may have inherited this variable from a login over another
        # network.
        with contextlib.suppress(KeyError, IndexError):
            return os.environ["SSH_CONNECTION"].split()[2]
        return local_address(None)
    family, _, _, _, target = socket.getaddrinfo(settings.towards, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as looking:
        looking.connect(target)  # sends nothing
        return str(looking.getsockname()[0])


def versions() -> dict[str, str]:
    """Versions that must match on all hosts. Does not import torch, which takes seconds."""
    found = {"python": platform.python_version(), "kernel": platform.release()}
    for package in ("stormtorch", "torch"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "none"
    return found


def cuda_version() -> str | None:
    """Version of CUDA that torch was built for; None without torch or without CUDA."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    with contextlib.suppress(OSError):
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
        found = re.search(r"^cuda\b[^=]*= ['\"]([\d.]+)['\"]", text, re.M)
        return found[1] if found else None
    return None


def _self_report(settings: WorkerSettings, here: str, opened: socket.socket, tcp_port: int) -> dict[str, Any]:
    return {
        "rank": settings.rank,
        "host": socket.gethostname(),
        "address": here,
        "port": opened.getsockname()[1],
        "tcp_port": tcp_port,
        "mtu": _mtu(here),
        "asked_buffer": settings.receive_buffer_bytes,
        "receive_buffer": granted(opened).receive,
        "versions": versions(),
        "chosen_port": bool(settings.port),
        "pid": os.getpid(),
        "time": time.time(),
    }


def _mtu(here: str) -> int:
    """MTU of the interface with an address, at most that of the largest datagram (loopback's is larger)."""
    return min(interface_mtu(here) or 1500, MOST_PAYLOAD + header_bytes(here))


def _why(error: Exception, settings: WorkerSettings) -> str:
    if isinstance(error, OSError) and settings.port:
        return f"cannot open UDP port {settings.port}: {error.strerror or error}; choose another one by --port"
    return f"cannot open a UDP socket: {error}; name the interface by --interface"


class _TcpResponder:
    """Answers TCP connections with a banner, so that a peer can distinguish blocked UDP from an unreachable host."""

    def __init__(self, host: str) -> None:
        self._listener = socket.socket(family_of(host), socket.SOCK_STREAM)
        self._listener.bind(socket_address(host, 0))
        self._listener.listen(64)

    def __enter__(self) -> int:
        threading.Thread(target=self._send_banners, name="doctor's TCP responder", daemon=True).start()
        return int(self._listener.getsockname()[1])

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _send_banners(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with contextlib.suppress(OSError), connection:
                connection.settimeout(1.0)
                connection.sendall(TCP_BANNER)

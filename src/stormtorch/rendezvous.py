"""From a store to a transport: ranks publish where they are and agree on what must be the same."""

import fcntl
import hashlib
import hmac
import ipaddress
import json
import os
import secrets
import socket
import struct
from typing import Any

from torch.distributed.distributed_c10d import Store

from stormtorch import _engine
from stormtorch.options import Options
from stormtorch.udp import UdpTransport

_SIOCGIFADDR = 0x8915
# Enough credit per peer for a few datagrams in flight: with many ranks, large datagrams would each fill a share.
_DATAGRAMS_PER_CREDIT = 4
_SMALLEST_DATAGRAM = 1472
# A trip over loopback costs a wake-up or two, in which a core copies so much; elsewhere, take 1 Gbit/s and 0.1 ms.
_LOOPBACK_TRIP_BYTES = 128 << 10
_TRIP_BYTES = 16 << 10


def connect(
    store: Store, rank: int, world: int, options: Options | None = None, *, prefix: str = "storm"
) -> UdpTransport:
    """Joins a job: publishes this rank's address in `store`, waits for the others, and starts the engine.

    Args:
        store: Any torch.distributed store that all ranks share.
        rank: This rank.
        world: Number of ranks.
        options: Settings of this rank. `key` must be the same on every rank; addresses may differ.
        prefix: Separates several transports in one store.
    """
    options = options or Options()
    if not 0 <= rank < world:
        raise ValueError(f"rank must lie in [0, world), got rank {rank} of {world}")
    host = local_address(options.interface)
    loopback = ipaddress.ip_address(host.partition("%")[0]).is_loopback
    endpoint = _engine.Endpoint(
        host,
        options.port,
        receive_buffer=options.receive_buffer_bytes,
        low_priority=options.rate == "low",
        segmentation=options.segmentation,
        coalescing=options.coalescing,
    )
    mtu = _engine.interface_mtu(host) or 1500
    card = {
        "host": host,
        "port": endpoint.port,
        "datagram_bytes": options.datagram_bytes or _engine.datagram_bytes(host, mtu),
        "chosen": options.datagram_bytes is not None,
        "receive_buffer": endpoint.receive_buffer,
        "eager_bytes": options.eager_bytes,
        "loopback": loopback,
        # Memory to memory, nothing is damaged. Datagrams of a chosen size play a network, which damages.
        "checks_data": bool(options.check or options.key or options.datagram_bytes) or not loopback,
        "nonce": secrets.token_hex(16),
    }
    if rank == 0:
        store.set(f"{prefix}/cookie", secrets.token_hex(8))
    cookie = store.get(f"{prefix}/cookie")
    card["key"] = _fingerprint(options.key, cookie)
    store.set(f"{prefix}/card/{rank}", json.dumps(card))
    cards = [json.loads(store.get(f"{prefix}/card/{peer}")) for peer in range(world)]
    for peer, other in enumerate(cards):
        if other["key"] != card["key"]:
            raise ValueError(
                f"rank {rank} and rank {peer} were given different keys: `key` must be the same on every rank"
            )

    receive_buffer = min(other["receive_buffer"] for other in cards)
    datagram_bytes = _agree_on_datagram(cards, receive_buffer, world)
    mode, bytes_per_s = options.rate_mode(loopback=loopback)
    endpoint.start(
        rank,
        [(other["host"], other["port"]) for other in cards],
        {
            "datagram_bytes": datagram_bytes,
            "receive_buffer": receive_buffer,
            "pool_bytes": options.pool_bytes,
            "eager_bytes": min(other["eager_bytes"] for other in cards),
            "rate_mode": int(mode),
            "bytes_per_s": bytes_per_s,
            "silence_s": options.silence_s,
            "cookie": int(cookie, 16),
            "checks_data": any(other["checks_data"] for other in cards),
            "keys": []
            if options.key is None
            else [_derive(options.key, cookie, p, c["nonce"]) for p, c in enumerate(cards)],
        },
    )
    return UdpTransport(
        endpoint,
        rank=rank,
        world=world,
        chunk_bytes=_engine.chunk_bytes(datagram_bytes, options.key is not None),
        trip_bytes=_LOOPBACK_TRIP_BYTES if all(other["loopback"] for other in cards) else _TRIP_BYTES,
        silence_s=options.silence_s,
        timeout_s=options.timeout_s,
        linger_s=options.linger_s,
    )


def local_address(interface: str | None) -> str:
    """The numeric address to bind: of the named interface, or of the route to the rendezvous (MASTER_ADDR)."""
    if interface is None:
        return _address_towards(os.environ.get("MASTER_ADDR", "127.0.0.1"))
    try:
        ipaddress.ip_address(interface.partition("%")[0])
    except ValueError:
        pass
    else:
        return interface
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            request = struct.pack("256s", interface.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    except OSError:
        pass
    six = _ipv6_of(interface)
    if six is not None:
        return six
    names = ", ".join(name for _, name in socket.if_nameindex())
    raise ValueError(f"interface {interface!r} has no address; interfaces of this machine: {names}")


def _address_towards(master: str) -> str:
    family, _, _, _, target = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing; the kernel only looks up the route
        return str(probe.getsockname()[0])


def _ipv6_of(interface: str) -> str | None:
    try:
        with open("/proc/net/if_inet6") as table:
            rows = [line.split() for line in table]
    except OSError:
        return None
    for digits, _, _, scope, _, name in rows:
        if name == interface:
            address = str(ipaddress.IPv6Address(bytes.fromhex(digits)))
            return f"{address}%{name}" if scope == "20" else address
    return None


def _agree_on_datagram(cards: list[dict[str, Any]], receive_buffer: int, world: int) -> int:
    smallest = min(int(card["datagram_bytes"]) for card in cards)
    if any(card["chosen"] for card in cards):
        return smallest
    credit = receive_buffer // max(world - 1, 1)
    return min(smallest, max(credit // _DATAGRAMS_PER_CREDIT, _SMALLEST_DATAGRAM))


def _fingerprint(key: bytes | None, cookie: bytes) -> str:
    return "" if key is None else hmac.new(key, b"fingerprint" + cookie, hashlib.sha256).hexdigest()


def _derive(key: bytes, cookie: bytes, rank: int, nonce: str) -> bytes:
    """A key of its own for each sender and run, so that packet numbers may start at one every time."""
    return hmac.new(key, b"sender" + cookie + struct.pack("<H", rank) + nonce.encode(), hashlib.sha256).digest()[:16]

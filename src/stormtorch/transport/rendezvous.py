"""Joining a job: ranks publish their addresses in a store, agree on common settings, and start their transports."""

import fcntl
import functools
import ipaddress
import logging
import os
import secrets
import socket
import struct
from collections.abc import Sequence
from dataclasses import replace

from torch.distributed.distributed_c10d import Store

import stormtorch._engine as _engine
from stormtorch.transport.attendance import Attendance
from stormtorch.transport.cards import (
    Agreement,
    Card,
    agree,
    derive_key,
    fingerprint,
    first,
    newest,
    next_incarnation,
    places,
    publish,
)
from stormtorch.transport.keys import VARIABLE as KEY_VARIABLE
from stormtorch.transport.options import Options
from stormtorch.transport.udp import UdpTransport

_log = logging.getLogger("stormtorch")
_SIOCGIFADDR = 0x8915
_TEST_NETWORK = ipaddress.ip_network("198.18.0.0/15")
"""Addresses reserved for tests of networks, never routed (RFC 2544); the lab's hosts have them."""


def connect(
    store: Store, rank: int, world: int, options: Options | None = None, *, prefix: str = "storm"
) -> UdpTransport:
    """Joins a job: publishes this rank's address in `store`, waits for the others, and starts the engine.

    Args:
        store: Any torch.distributed store that all ranks share.
        rank: This rank.
        world: Number of ranks.
        options: Settings of this rank. `key` must be the same on every rank; addresses may differ. With `rejoin`, this
            function does what `rejoin()` does.
        prefix: Prefix of all keys in the store, which keeps several transports in one store apart.

    Raises:
        RanksMissing: Some ranks have not come within the options' `timeout_s` or the store's timeout; the error names
            them.
        PeerFailed: A rank could not join; the error says why.
    """
    options = options or Options()
    if options.rejoin:
        return rejoin(store, rank, world, options, prefix=prefix)
    _check_rank(rank, world)
    attendance = Attendance(store, prefix, rank, world, options.timeout_s)
    with attendance.or_note():
        endpoint, card = _bind(options)
    if rank == 0:
        store.set(f"{prefix}/cookie", secrets.token_hex(8))
    attendance.wait({0: f"{prefix}/cookie"})
    cookie = store.get(f"{prefix}/cookie")
    card = replace(card, fingerprint=fingerprint(options.key, cookie))
    publish(store, prefix, rank, card)
    attendance.wait(places(prefix, world))
    cards = [first(store, prefix, peer) for peer in range(world)]
    _check_keys(rank, card, cards)
    if rank == 0 and options.key is None and any(_meets_strangers(each) for each in cards):
        _warn_of_strangers()
    return _start(endpoint, store, prefix, rank, cards, agree(cards), options, cookie)


def rejoin(
    store: Store, rank: int, world: int, options: Options | None = None, *, prefix: str = "storm"
) -> UdpTransport:
    """Takes the place of a rank whose process died, in a job that goes on.

    The agreement that the ranks made at the start still holds. The transport can be used at once, but a peer accepts
    its datagrams only after it has readmitted this process: see `returned` and `UdpTransport.readmit`. Other ranks may
    have died meanwhile. Sequence numbers start at zero here, so exchanges need a group whose name is new to all ranks.

    Args:
        store: Store by which the job was connected; it must have survived.
        rank: Rank to take the place of.
        world: Number of ranks, the same as before.
        options: Settings of this process. `key` must be the job's; `datagram_bytes`, `eager_bytes` and `check` are
            ignored, as those of the job apply.
        prefix: Prefix that the other ranks gave to `connect`.
    """
    options = options or Options()
    _check_rank(rank, world)
    cookie = store.get(f"{prefix}/cookie")
    founders = [first(store, prefix, peer) for peer in range(world)]
    agreement = agree(founders)
    endpoint, card = _bind(options)
    card = replace(card, fingerprint=fingerprint(options.key, cookie))
    _check_keys(rank, card, founders)
    # Trust an explicit datagram size; otherwise this MTU must be at least the job's.
    if card.datagram_bytes < agreement.datagram_bytes and not card.chosen and not any(c.chosen for c in founders):
        raise ValueError(
            f"rank {rank}: the job's datagrams have {agreement.datagram_bytes} bytes, but {card.host} lets only "
            f"{card.datagram_bytes} through: rejoin from an interface with at least the MTU that the job started with"
        )
    cards = [newest(store, prefix, peer, 0) or founder for peer, founder in enumerate(founders)]
    cards[rank] = card = replace(card, incarnation=next_incarnation(store, prefix, rank))
    # This socket's buffer may be smaller than agreed; the credit that this rank gives then follows it.
    agreement = replace(agreement, receive_buffer=min(agreement.receive_buffer, card.receive_buffer))
    transport = _start(endpoint, store, prefix, rank, cards, agreement, options, cookie)
    publish(store, prefix, rank, card)
    return transport


def reincarnate(transport: UdpTransport) -> None:
    """Lets a rank that was cut off return as a new process would, but within its own process.

    Its old endpoint says goodbye, so that nobody waits for data that it will not send. Peers accept the new endpoint
    after they have readmitted it, as after `rejoin`.
    """
    transport.close(0.0)
    options = replace(transport.options, port=0)
    transport.succeed(rejoin(transport.store, transport.rank, transport.world, options, prefix=transport.prefix))


def returned(store: Store, peer: int, known_incarnation: int, *, prefix: str = "storm") -> Card | None:
    """Card of a newer process that has taken a peer's place; None if there is none.

    Looks into the store and never blocks. Pass the card to `UdpTransport.readmit`.

    Args:
        store: Store by which the job was connected: `transport.store`.
        peer: Rank to look for.
        known_incarnation: Number of the process that this rank knows, `transport.incarnation(peer)`: 0 is the first.
        prefix: Prefix that was given to `connect`: `transport.prefix`.
    """
    return newest(store, prefix, peer, known_incarnation)


def _check_rank(rank: int, world: int) -> None:
    if not 0 <= rank < world:
        raise ValueError(f"rank must lie in [0, world), got rank {rank} of {world}")


def _check_keys(rank: int, card: Card, cards: Sequence[Card]) -> None:
    for peer, other in enumerate(cards):
        if other.fingerprint != card.fingerprint:
            raise ValueError(f"rank {rank} and rank {peer} have different keys: `key` must be the same on every rank")


def _meets_strangers(card: Card) -> bool:
    """Whether others may share the rank's network: not on loopback, nor on the lab's network, which is for tests."""
    return not card.loopback and ipaddress.ip_address(card.host.partition("%")[0]) not in _TEST_NETWORK


@functools.cache  # once per process
def _warn_of_strangers() -> None:
    _log.warning(
        "rank 0: this job uses a network without a key. Anyone who reaches its store can read the cookie there and "
        "forge datagrams with it: gradients, or a ping that silences a link. Anyone who sees packets can read them. "
        "Unless the network is yours alone, make a key by `stormtorch keygen` and give it to every rank, as "
        "Options(key=...) or, with torch.distributed, in %s.",
        KEY_VARIABLE,
    )


def _bind(options: Options) -> tuple[_engine.Endpoint, Card]:
    """Opens a socket, and makes the card of this process, still without the fingerprint."""
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
    return endpoint, Card(
        host=host,
        port=endpoint.port,
        datagram_bytes=options.datagram_bytes or _engine.datagram_bytes(host, mtu),
        chosen=options.datagram_bytes is not None,
        receive_buffer=endpoint.receive_buffer,
        eager_bytes=options.eager_bytes,
        loopback=loopback,
        # Loopback copies memory and damages nothing. A chosen datagram size imitates a network, which may damage data.
        checks_data=bool(options.check or options.key or options.datagram_bytes) or not loopback,
        nonce=secrets.token_hex(16),
        fingerprint="",
    )


def _start(
    endpoint: _engine.Endpoint,
    store: Store,
    prefix: str,
    rank: int,
    cards: Sequence[Card],
    agreement: Agreement,
    options: Options,
    cookie: bytes,
) -> UdpTransport:
    mode, bytes_per_s = options.rate_mode(loopback=cards[rank].loopback)
    key = options.key
    endpoint.start(
        rank,
        [(card.host, card.port) for card in cards],
        {
            "datagram_bytes": agreement.datagram_bytes,
            "receive_buffer": agreement.receive_buffer,
            "pool_bytes": options.pool_bytes,
            "eager_bytes": agreement.eager_bytes,
            "rate_mode": int(mode),
            "bytes_per_s": bytes_per_s,
            "silence_s": options.silence_s,
            "cookie": int(cookie, 16),
            "checks_data": agreement.checks_data,
            "incarnations": [card.incarnation for card in cards],
            "keys": [] if key is None else [derive_key(key, cookie, peer, card) for peer, card in enumerate(cards)],
        },
    )
    return UdpTransport(
        endpoint,
        rank=rank,
        world=len(cards),
        chunk_bytes=_engine.chunk_bytes(agreement.datagram_bytes, key is not None),
        trip_bytes=agreement.trip_bytes,
        silence_s=options.silence_s,
        timeout_s=options.timeout_s,
        linger_s=options.linger_s,
        options=options,
        store=store,
        prefix=prefix,
        incarnations=[card.incarnation for card in cards],
        key_of=lambda peer, card: derive_key(key, cookie, peer, card),
    )


def local_address(interface: str | None) -> str:
    """Numeric address to bind: that of the named interface, or of the route to the rendezvous (MASTER_ADDR)."""
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
    raise ValueError(f"interface {interface!r} does not exist or has no address; this machine has {names}")


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

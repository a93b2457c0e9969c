"""From a store to a transport: ranks publish where they are and agree on what must be the same."""

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

from stormtorch import _engine
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
"""Reserved for tests of networks, never routed (RFC 2544); the lab's hosts are there."""


def connect(
    store: Store, rank: int, world: int, options: Options | None = None, *, prefix: str = "storm"
) -> UdpTransport:
    """Joins a job: publishes this rank's address in `store`, waits for the others, and starts the engine.

    Args:
        store: Any torch.distributed store that all ranks share.
        rank: This rank.
        world: Number of ranks.
        options: Settings of this rank. `key` must be the same on every rank; addresses may differ. With `rejoin`, this
            is `rejoin()`.
        prefix: Separates several transports in one store.

    Raises:
        RanksMissing: Some ranks have not come within the options' `timeout_s` or the store's time-out; it names them.
        PeerFailed: A rank could not join, and told why.
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

    What the ranks agreed on at the start still holds. The transport can be used at once, but each peer hears it only
    once it has readmitted this process: see `returned` and `UdpTransport.readmit`. Other ranks may be dead meanwhile.
    Sequence numbers start at zero here, so exchanges with the others need a group of a name that is new to them.

    Args:
        store: The store that the job was connected by; it must have survived.
        rank: The rank to be.
        world: Number of ranks, as ever.
        options: Settings of this process. `key` must be the job's; `datagram_bytes`, `eager_bytes` and `check` are the
            job's anyway.
        prefix: As the others gave it to `connect`.
    """
    options = options or Options()
    _check_rank(rank, world)
    cookie = store.get(f"{prefix}/cookie")
    founders = [first(store, prefix, peer) for peer in range(world)]
    agreement = agree(founders)
    endpoint, card = _bind(options)
    card = replace(card, fingerprint=fingerprint(options.key, cookie))
    _check_keys(rank, card, founders)
    # Of a size that somebody chose, he knows best; any other must pass here as it passes elsewhere.
    if card.datagram_bytes < agreement.datagram_bytes and not card.chosen and not any(c.chosen for c in founders):
        raise ValueError(
            f"rank {rank}: the job's datagrams have {agreement.datagram_bytes} bytes, and {card.host} lets "
            f"{card.datagram_bytes} through: rejoin from an interface with as large an MTU as the ranks began with"
        )
    cards = [newest(store, prefix, peer, 0) or founder for peer, founder in enumerate(founders)]
    cards[rank] = card = replace(card, incarnation=next_incarnation(store, prefix, rank))
    # Our own socket may hold less than was agreed on; our credit then says so.
    agreement = replace(agreement, receive_buffer=min(agreement.receive_buffer, card.receive_buffer))
    transport = _start(endpoint, store, prefix, rank, cards, agreement, options, cookie)
    publish(store, prefix, rank, card)
    return transport


def reincarnate(transport: UdpTransport) -> None:
    """Has a rank that was cut off return as a new process would, with the process that it has.

    Its old endpoint says goodbye, so that nobody waits for what it will not send; peers hear the new one when they have
    readmitted it, as after `rejoin`.
    """
    transport.close(0.0)
    options = replace(transport.options, port=0)
    transport.succeed(rejoin(transport.store, transport.rank, transport.world, options, prefix=transport.prefix))


def returned(store: Store, peer: int, known_incarnation: int, *, prefix: str = "storm") -> Card | None:
    """The card of a process that has taken a peer's place since the one that we know; None if there is none.

    Looks into the store and never blocks. Give the card to `UdpTransport.readmit`.

    Args:
        store: The store that the job was connected by: `transport.store`.
        peer: The rank in question.
        known_incarnation: Of the process that we know, `transport.incarnation(peer)`: 0 is the first.
        prefix: As it was given to `connect`: `transport.prefix`.
    """
    return newest(store, prefix, peer, known_incarnation)


def _check_rank(rank: int, world: int) -> None:
    if not 0 <= rank < world:
        raise ValueError(f"rank must lie in [0, world), got rank {rank} of {world}")


def _check_keys(rank: int, card: Card, cards: Sequence[Card]) -> None:
    for peer, other in enumerate(cards):
        if other.fingerprint != card.fingerprint:
            raise ValueError(
                f"rank {rank} and rank {peer} were given different keys: `key` must be the same on every rank"
            )


def _meets_strangers(card: Card) -> bool:
    """Whether others may be where the rank is. Nobody is on loopback, nor on the lab's network, which is for tests."""
    return not card.loopback and ipaddress.ip_address(card.host.partition("%")[0]) not in _TEST_NETWORK


@functools.cache  # once per process
def _warn_of_strangers() -> None:
    _log.warning(
        "rank 0: this job leaves the machine without a key. Whoever reaches its store can read the cookie there and "
        "forge datagrams with it: gradients, or a ping that silences a link. Whoever sees its packets can read them. "
        "Unless the network is yours alone, make a key by `stormtorch keygen` and give it to every rank, as "
        "Options(key=...) or, with torch.distributed, in %s.",
        KEY_VARIABLE,
    )


def _bind(options: Options) -> tuple[_engine.Endpoint, Card]:
    """A socket, and the card of whoever has it; the fingerprint is still to be filled in."""
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
        # Memory to memory, nothing is damaged. Datagrams of a chosen size play a network, which damages.
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

"""Start of a transport: opens its sockets, makes its card, and starts the engine once the other cards are known."""

import ipaddress
import logging
import secrets
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version

from torch.distributed.distributed_c10d import Store

import stormtorch._engine as _engine
from stormtorch.exchange.lanes import own_cores, sockets_to_open
from stormtorch.exchange.options import Options
from stormtorch.joining.admission import AdmissionService
from stormtorch.udp.address_book import AddressBook, behind_nat
from stormtorch.udp.addresses import check_families, from_here, interface_mbit, local_address
from stormtorch.udp.cards import Agreement, Card, JobDescription, LinkKeys
from stormtorch.udp.machine import machine_id
from stormtorch.udp.roaming import Roaming
from stormtorch.udp.rpc import Answer, RpcServer
from stormtorch.udp.udp import UdpTransport
from stormtorch.udp.view_installer import install_views

_log = logging.getLogger("stormtorch")


def bind(options: Options, agreement: Agreement | None = None) -> tuple[_engine.Endpoint, Card]:
    """Opens a socket per lane, and makes this process's card, still without fingerprint and admission port.

    Args:
        options: Settings of this process.
        agreement: Common settings of a running job, for a process that joins it.
    """
    lanes = None if agreement is None else agreement.lanes
    low = options.has_low_lane if agreement is None else agreement.low
    hosts = [local_address(each) for each in options.interfaces or (options.interface,)]
    if len(set(hosts)) < len(hosts):
        raise ValueError(f"interfaces {options.interfaces!r} must have different addresses, got {hosts!r}")
    if len(hosts) > 1 and ((lanes or 1) > 1 or low):
        raise ValueError(
            f"interfaces: this job has {(lanes or 1) + low} lanes, and several interfaces allow only one lane: name "
            "one interface"
        )
    host, *more_hosts = hosts
    loopback = all(ipaddress.ip_address(each.partition("%")[0]).is_loopback for each in hosts)
    try:
        endpoint = _engine.Endpoint(
            host,
            options.port,
            receive_buffer=options.receive_buffer_bytes,
            low_priority=options.is_low,
            segmentation=options.segmentation,
            coalescing=options.coalescing,
            lanes=sockets_to_open(options) if lanes is None else lanes,
            more_hosts=more_hosts,
            low_lane=low,
        )
    except RuntimeError as error:
        if not options.port:
            raise
        raise RuntimeError(
            f"{error}, at {', '.join(hosts)}: does another rank use this port? Set another `port` in Options, or 0 for "
            "any free one; each of the `lanes` needs a port"
        ) from error
    largest = min(_engine.datagram_bytes(each, _engine.interface_mtu(each) or 1500) for each in hosts)
    port, *more_ports = endpoint.ports
    low_port = more_ports.pop() if low else 0
    return endpoint, Card(
        host=host,
        port=port,
        datagram_bytes=options.datagram_bytes or largest,
        chosen=options.datagram_bytes is not None,
        receive_buffer=endpoint.receive_buffer,
        eager_bytes=options.eager_bytes,
        loopback=loopback,
        # Loopback copies memory and corrupts nothing. A chosen datagram size emulates a network, which may.
        checks_data=bool(options.check or options.key or options.datagram_bytes) or not loopback,
        nonce=secrets.token_hex(16),
        fingerprint="",
        spare_ranks=options.spare_ranks,
        machine=machine_id(),
        lanes=more_ports,
        cores=own_cores() if options.lanes is None else 0,
        interface_mbit=interface_mbit(host),
        nat=0 if options.nat is None else 1 if options.nat else -1,
        paths=[[*each] for each in zip(more_hosts, endpoint.path_ports, strict=True)],
        low=low_port,
    )


def open_admission_port(card: Card, options: Options, answer: Answer) -> tuple[RpcServer | None, Card]:
    """Opens this process's TCP port for join requests; returns the card with that port."""
    try:
        listener = RpcServer(card.host, card.port, key=options.key, version=version("stormtorch"), answer=answer)
    except OSError as error:
        _log.warning("cannot listen for TCP at %s: %s. Late joiners must use other ranks' ports.", card.host, error)
        return None, card
    if options.port and listener.port != options.port:
        _log.warning(
            "TCP port %d of %s is taken: processes that join the job through this rank use port %d. Does the firewall "
            "admit it?",
            options.port,
            card.host,
            listener.port,
        )
    return listener, replace(card, reception=listener.port)


def start(
    endpoint: _engine.Endpoint,
    listener: RpcServer | None,
    store: Store,
    rank: int,
    cards: Mapping[int, Card],
    job: JobDescription,
    options: Options,
) -> UdpTransport:
    """Starts the engine, and makes the transport of a rank.

    Args:
        endpoint: Endpoint with open sockets.
        listener: Open port for join requests; None serves none.
        store: Store of the job, or one of this process alone.
        rank: This rank.
        cards: The newest card of each rank that has one. This rank's own is the one that this process made, never the
            store's copy.
        job: Description of the job.
        options: Settings of this process.
    """
    agreement, key, own = job.agreement, options.key, cards[rank]
    check_families({slot: card.host for slot, card in cards.items()})
    keys_of = LinkKeys(key, job.cookie, rank, own)
    mode, bytes_per_s = options.rate_mode(loopback=own.loopback)
    slots, lanes = range(job.capacity), range(agreement.lanes + agreement.low)
    addresses = {
        slot: [(from_here(host, own.host), port) for host, port in card.ports(agreement.lanes, low=agreement.low)]
        for slot, card in cards.items()
    }
    endpoint.start(
        rank,
        [[addresses[slot][lane] if slot in cards else ("", 0) for slot in slots] for lane in lanes],
        {
            "datagram_bytes": agreement.datagram_bytes,
            "receive_buffer": agreement.receive_buffer,
            "pool_bytes": max(options.pool_bytes // len(lanes), 4096),
            "eager_bytes": agreement.eager_bytes,
            "rate_mode": int(mode),
            "low_rate_mode": int(options.low_rate_mode(loopback=own.loopback)),
            "yield_delay_s": options.yield_delay_s,
            "bytes_per_s": bytes_per_s / agreement.lanes,
            "silence_s": options.silence_s,
            "cookie": int(job.cookie, 16),
            "checks_data": agreement.checks_data,
            "vacant": [slot for slot in slots if slot not in cards],
            "incarnations": [cards[slot].incarnation if slot in cards else 0 for slot in slots],
            "keys": []
            if key is None
            else [
                [keys_of(slot, cards[slot], lane) if slot in cards and slot != rank else b"" for slot in slots]
                for lane in lanes
            ],
        },
        more=[cards[slot].more_paths() if slot in cards else [] for slot in slots],
    )
    transport = UdpTransport(
        endpoint,
        rank=rank,
        world=job.world,
        capacity=job.capacity,
        chunk_bytes=_engine.chunk_bytes(agreement.datagram_bytes, key is not None),
        trip_bytes=agreement.trip_bytes,
        silence_s=options.silence_s,
        timeout_s=options.timeout_s,
        linger_s=options.linger_s,
        options=options,
        store=store,
        prefix=job.prefix,
        cards=cards,
        keys_of=keys_of,
    )
    transport.name, transport.job = job.name, job.id
    if not own.loopback:
        transport.roaming = Roaming(
            [own.host, *(host for host, _ in own.more_paths())], list(options.interfaces or (options.interface,))
        )
    install_views(transport)
    if behind_nat(cards.values()):
        transport.address_book = AddressBook(transport)
        transport.address_book.watch()
    if options.shares_memory and own.machine:
        transport.share_memory()
    if listener is not None:
        transport.serve_requests(listener, AdmissionService(transport, job))
        _log.info("rank %d: receives join requests at %s:%d", rank, own.host, own.reception)
    return transport

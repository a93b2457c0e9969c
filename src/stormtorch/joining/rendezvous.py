"""Rendezvous: ranks publish their addresses in a store, agree on common settings, and start their transports."""

import contextlib
import functools
import ipaddress
import json
import logging
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version

from torch.distributed.distributed_c10d import Store

from stormtorch.exchange.keys import VARIABLE as KEY_VARIABLE
from stormtorch.exchange.options import Options
from stormtorch.joining.admission import answer_before_joining
from stormtorch.joining.join_client import admission_addresses, check_path, join_running_job
from stormtorch.joining.restarting import Generations, JobAlreadyRuns
from stormtorch.joining.starting import bind, open_admission_port, start
from stormtorch.udp.cards import (
    ADVICE,
    Card,
    JobDescription,
    agree,
    card_keys,
    fingerprint,
    first_card,
    known_cards,
    newest_card,
    next_incarnation,
    publish,
    publish_successor_card,
)
from stormtorch.udp.store_rendezvous import StoreRendezvous
from stormtorch.udp.udp import UdpTransport

_log = logging.getLogger("stormtorch")
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
            process takes over a rank whose process died: it reserves the slot here, and `prepare` joins the view.
        prefix: Prefix of all keys in the store, which keeps several transports in one store apart.

    Raises:
        RanksMissing: Some ranks have not joined within the options' `timeout_s` or the store's timeout; the error
            names them.
        PeerFailed: A rank could not join; the error says why.
        Unreachable: NAT traversal to another rank failed; the error names both.
        NotAdmitted: With `rejoin`, the running job refused this process; the error says why.
    """
    options = options or Options()
    _check_rank(rank, world)
    if options.rejoin == "auto":
        return _start_or_rejoin(store, rank, world, options, prefix)
    if options.rejoin:
        store.get(f"{prefix}/cookie")  # waits until there is a job
        where = admission_addresses([card for peer, card in known_cards(store, prefix, world).items() if peer != rank])
        return _take_over_rank(store, rank, world, options, prefix, where)
    return _rendezvous(store, rank, world, options, prefix)


def _start_or_rejoin(store: Store, rank: int, world: int, options: Options, prefix: str) -> UdpTransport:
    generations = Generations(store, rank, world, options, prefix)
    while True:
        location = generations.find_job()
        if location.where:
            return _take_over_rank(store, rank, world, options, location.prefix, location.where)
        with contextlib.suppress(JobAlreadyRuns):
            check_earlier_generations = functools.partial(generations.check_earlier_generations, location.prefix)
            return _rendezvous(store, rank, world, options, location.prefix, check_earlier_generations)


def _take_over_rank(
    store: Store, rank: int, world: int, options: Options, prefix: str, where: Sequence[tuple[str, int]]
) -> UdpTransport:
    """Takes over a rank whose process died, by a late join."""
    transport = join_running_job(where, options, rank=rank, store=store)
    if transport.world != world:
        transport.close(0.0)
        raise ValueError(
            f"rank {rank}: the running job began with {transport.world} ranks, and this process was given {world}: "
            "give it the same world size"
        )
    with contextlib.suppress(RuntimeError):  # the ranks know the card already; the store serves later joiners only
        publish_successor_card(store, prefix, rank, transport.cards[rank])
    return transport


def _rendezvous(
    store: Store,
    rank: int,
    world: int,
    options: Options,
    prefix: str,
    meanwhile: Callable[[], None] | None = None,
) -> UdpTransport:
    store_rendezvous = StoreRendezvous(store, prefix, rank, world, options.timeout_s, meanwhile)
    with store_rendezvous.publish_failure():
        endpoint, card = bind(options)
        listener, card = open_admission_port(card, options, answer_before_joining)
    try:
        # A rank 0 that died during the rendezvous may have left a cookie, which the others already use.
        founded = meanwhile is not None and store.check([f"{prefix}/cookie"])
        job, cards = _agree_in_store(store, rank, world, options, prefix, store_rendezvous, card, founded)
        transport = start(endpoint, listener, store, rank, cards, job, options)
    except BaseException:
        if listener is not None:
            listener.close()  # otherwise it would still answer that this rank is in the rendezvous
        raise
    if transport.address_book is not None:
        _wait_for_routes(transport, store_rendezvous)
    return transport


def _agree_in_store(
    store: Store,
    rank: int,
    world: int,
    options: Options,
    prefix: str,
    store_rendezvous: StoreRendezvous,
    card: Card,
    founded: bool,
) -> tuple[JobDescription, dict[int, Card]]:
    """Publishes this rank's card, and returns the job's description and all cards.

    `founded`: a rank 0 has drawn the cookie already.
    """
    drawn = None
    if rank == 0 and not founded:
        store.set(f"{prefix}/start", json.dumps({"world": world, "version": version("stormtorch")}))
        drawn = secrets.token_hex(8)
        store.set(f"{prefix}/cookie", drawn)
    store_rendezvous.wait({0: f"{prefix}/cookie"})
    with store_rendezvous.publish_failure():
        _check_start(store, prefix, rank, world)
        cookie = _read_cookie(store, prefix)
        if drawn is not None and drawn.encode() != cookie:
            raise ValueError(f"rank {rank}: the store has another cookie than this process has written. {ADVICE}")
    card = replace(card, fingerprint=fingerprint(options.key, cookie))
    publish(store, prefix, rank, card)
    store_rendezvous.wait(card_keys(prefix, world))
    with store_rendezvous.publish_failure():
        cards = [first_card(store, prefix, peer) for peer in range(world)]
        _check_cards(rank, card, cards)
    cards[rank] = card  # not the store's copy: keys are derived from it
    if rank == 0 and options.key is None and any(_on_shared_network(each) for each in cards):
        _warn_without_key()
    return JobDescription(cookie=cookie, agreement=agree(cards), prefix=prefix, world=world), dict(enumerate(cards))


def _wait_for_routes(transport: UdpTransport, store_rendezvous: StoreRendezvous) -> None:
    assert transport.address_book is not None
    try:
        with store_rendezvous.publish_failure():
            peers = [peer for peer in range(transport.world) if peer != transport.rank]
            transport.address_book.wait_for_peers(peers, transport.silence_s)
    except BaseException:
        transport.close(0.0)
        raise


def rejoin(
    store: Store, rank: int, world: int, options: Options | None = None, *, prefix: str = "storm"
) -> UdpTransport:
    """Takes over a rank whose process died, in a job that goes on.

    The settings that the ranks agreed on at the start still hold. The transport can be used at once, but a peer accepts
    its datagrams only after it has readmitted this process: see `newer_card` and `UdpTransport.readmit`. Other ranks
    may have died meanwhile. Sequence numbers start at 0 here, so exchanges need a group whose name is new to all ranks.

    Args:
        store: Store by which the job was connected; it must have survived.
        rank: Rank to take over.
        world: Number of ranks, the same as before.
        options: Settings of this process. `key` must be the job's; `datagram_bytes`, `eager_bytes`, `check` and
            `lanes` are ignored, as those of the job apply.
        prefix: Prefix that the other ranks gave to `connect`.
    """
    options = options or Options()
    _check_rank(rank, world)
    cookie = _read_cookie(store, prefix)
    founders = [first_card(store, prefix, peer) for peer in range(world)]
    agreement = agree(founders)
    endpoint, card = bind(options, agreement)
    listener, card = open_admission_port(card, options, answer_before_joining)
    card = replace(card, fingerprint=fingerprint(options.key, cookie))
    _check_keys(rank, card, founders)
    check_path(f"rank {rank}", card, agreement, founders)
    cards = {peer: newest_card(store, prefix, peer, 0) or founder for peer, founder in enumerate(founders)}
    cards[rank] = card = replace(card, incarnation=next_incarnation(store, prefix, rank))
    # This socket's buffer may be smaller than agreed; the credit that this rank grants then follows it.
    agreement = replace(agreement, receive_buffer=min(agreement.receive_buffer, card.receive_buffer))
    job = JobDescription(cookie=cookie, agreement=agreement, prefix=prefix, world=world)
    transport = start(endpoint, listener, store, rank, cards, job, options)
    publish(store, prefix, rank, card)
    return transport


def rejoin_in_place(transport: UdpTransport) -> None:
    """Lets a rank that was cut off rejoin as a new incarnation, but within its own process.

    Its old endpoint sends a goodbye, so that no peer waits for data that it will not send. Peers accept the new
    endpoint after they have readmitted it, as after `rejoin`.
    """
    transport.close(0.0)
    options = replace(transport.options, port=0)
    transport.replace_endpoint(
        rejoin(transport.store, transport.rank, transport.world, options, prefix=transport.prefix)
    )


def newer_card(store: Store, peer: int, known_incarnation: int, *, prefix: str = "storm") -> Card | None:
    """Card of a newer process of a peer's rank; None if there is none.

    Reads the store and never blocks. Pass the card to `UdpTransport.readmit`.

    Args:
        store: Store by which the job was connected: `transport.store`.
        peer: Rank to look for.
        known_incarnation: Number of the process that this rank knows, `transport.incarnation(peer)`: 0 is the first.
        prefix: Prefix that was given to `connect`: `transport.prefix`.
    """
    return newest_card(store, prefix, peer, known_incarnation)


def _check_rank(rank: int, world: int) -> None:
    if not 0 <= rank < world:
        raise ValueError(f"rank must lie in [0, world), got rank {rank} of {world}")


def _check_start(store: Store, prefix: str, rank: int, world: int) -> None:
    """Raises ValueError if rank 0 was started with another world size, or runs another version of stormtorch."""
    if not store.check([f"{prefix}/start"]):  # written before the cookie, which is there
        raise ValueError(f"rank 0 runs an older version of stormtorch than rank {rank}: install the same on all hosts")
    try:
        start = json.loads(store.get(f"{prefix}/start"))
        started, theirs = int(start["world"]), str(start["version"])
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError(f"the store holds no valid start entry of rank 0 at {prefix}/start. {ADVICE}") from None
    if started != world:
        raise ValueError(
            f"rank {rank} was started as one of {world} ranks, but rank 0 as one of {started}: give all ranks "
            "the same world size"
        )
    own = version("stormtorch")
    if theirs != own:
        raise ValueError(
            f"rank {rank} runs stormtorch {own}, but rank 0 runs {theirs:.20}: install the same version on all hosts"
        )


def _read_cookie(store: Store, prefix: str) -> bytes:
    cookie = bytes(store.get(f"{prefix}/cookie"))
    if not re.fullmatch(rb"[0-9a-f]{16}", cookie):
        raise ValueError(f"the store holds no valid cookie at {prefix}/cookie: {cookie[:40]!r}. {ADVICE}")
    return cookie


def _check_cards(rank: int, card: Card, cards: Sequence[Card]) -> None:
    """Raises ValueError if the store has other cards than the ranks have written."""
    if cards[rank] != card:
        raise ValueError(f"rank {rank}: the store has another card than this process has written. {ADVICE}")
    _check_keys(rank, card, cards)
    ranks: dict[str, int] = {}
    for peer, other in enumerate(cards):
        if ranks.setdefault(other.nonce, peer) != peer:
            raise ValueError(
                f"rank {rank}: the store has the same card for ranks {ranks[other.nonce]} and {peer}. {ADVICE}"
            )


def _check_keys(rank: int, card: Card, cards: Sequence[Card]) -> None:
    for peer, other in enumerate(cards):
        if other.fingerprint != card.fingerprint:
            raise ValueError(
                f"rank {rank} and rank {peer} have different keys: `key` must be the same on every rank, in Options or "
                f"in {KEY_VARIABLE}. If it is, the store has entries of another job. {ADVICE}"
            )


def _on_shared_network(card: Card) -> bool:
    """Whether other users may share the rank's network: not on loopback, nor on the lab's test network."""
    return not card.loopback and ipaddress.ip_address(card.host.partition("%")[0]) not in _TEST_NETWORK


@functools.cache  # once per process
def _warn_without_key() -> None:
    _log.warning(
        "rank 0: this job uses a network without a key. Anyone who reaches its store can read the cookie there and "
        "forge datagrams: gradients, or a ping that silences a link. Anyone who sees packets can read them. "
        "Unless the network is yours alone, make a key by `stormtorch keygen` and give it to every rank, as "
        "Options(key=...) or, with torch.distributed, in %s.",
        KEY_VARIABLE,
    )

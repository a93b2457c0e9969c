"""Rendezvous data: the card that each process publishes in the store, and the settings that ranks derive from all."""

import hashlib
import hmac
import ipaddress
import json
import logging
import re
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import get_origin

from torch.distributed.distributed_c10d import Store

from stormtorch.exchange.lanes import lanes_for
from stormtorch.exchange.options import MOST_LANES, MOST_PATHS

_log = logging.getLogger("stormtorch")
# Each peer's credit must hold a few datagrams: with many ranks, one large datagram would use it up.
_DATAGRAMS_PER_CREDIT = 4
_SMALLEST_DATAGRAM = 1472
# Bandwidth-delay product. On loopback a round trip is a wake-up or two; elsewhere, assume 1 Gbit/s and 0.1 ms.
_LOOPBACK_TRIP_BYTES = 128 << 10
_TRIP_BYTES = 16 << 10
MOST_INCARNATIONS = 0xFFFFFFFF
"""Highest incarnation. Even with a restart per second, a rank takes at least half a year to reach it."""
_MOST_SLOTS = 256  # of a view
# Consecutive incarnations that may have been taken by processes which died before they published a card.
_MOST_UNPUBLISHED = 1024
_MOST_NUMBER = 1 << 40  # of bytes, cores or Mbit/s: more is malformed
MOST_BYTES = 400
"""Most bytes of a packed card."""
ADVICE = "Start each rank once, with a fresh store or another `prefix`"
"""End of errors about unexpected contents of the store."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """What one process of a rank publishes: its addresses and its settings."""

    host: str
    port: int
    datagram_bytes: int
    chosen: bool
    """Whether the user set `datagram_bytes`; otherwise it follows from the interface's MTU."""
    receive_buffer: int
    eager_bytes: int
    loopback: bool
    checks_data: bool
    nonce: str
    """Random number that makes this process's keys unique."""
    fingerprint: str
    """Fingerprint of the job key; ranks compare it."""
    incarnation: int = 0
    """Number of this process within its rank: 0 is the first, each later one is higher. Fences off older processes."""
    reception: int = 0
    """TCP port of this process for join requests; 0 if it serves none."""
    spare_ranks: int = 0
    """Slots that this process would keep for late joins."""
    machine: str = ""
    """Identity of the machine: ranks with the same one can share memory. Empty if unknown."""
    lanes: list[int] = field(default_factory=list)
    """Ports of lanes 1 and up; `port` is that of lane 0."""
    cores: int = 0
    """Cores that this process may use; 0 if the user set `lanes`."""
    interface_mbit: int = 0
    """Speed of the interface in Mbit/s; 0 if unknown."""
    nat: int = 0
    """The option `nat`: 1 for True, -1 for False; 0 decides by the addresses."""

    paths: list[list[str | int]] = field(default_factory=list)
    """Host and port of each further interface; `host` and `port` are those of the first."""

    low: int = 0
    """Port of the low-priority lane; 0 if there is none."""

    def more_paths(self) -> list[tuple[str, int]]:
        """Addresses of the further interfaces."""
        return [(str(host), int(port)) for host, port in self.paths]

    def ports(self, lanes: int, *, low: bool = False) -> list[tuple[str, int]]:
        """Addresses of the first `lanes` lanes; `low` adds the low-priority lane if there is one."""
        ports = [*(self.port, *self.lanes)[:lanes], *[self.low] * (low and self.low > 0)]
        return [(self.host, port) for port in ports]


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """Settings that every rank shares throughout the job, derived from the cards of the first processes."""

    datagram_bytes: int
    receive_buffer: int
    eager_bytes: int
    checks_data: bool
    trip_bytes: int
    spare_ranks: int
    """Slots beyond the ranks of the start."""
    lanes: int = 1
    """Sockets, with a thread each, among which a rank divides large messages."""
    low: bool = False
    """Whether each rank has one more lane, for low-priority traffic."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobDescription:
    """What a process must know about a job to take part, besides the other processes' cards."""

    cookie: bytes
    """Random number of the job; datagrams without it belong to another job."""
    agreement: Agreement
    prefix: str
    """Prefix of the job's keys in its store."""
    world: int
    """Number of ranks at the start."""
    name: str = "world"
    """Name of the group of all ranks."""

    @property
    def id(self) -> str:
        """Unique name of this run, the same on all ranks. A hash: it does not reveal the cookie."""
        return hashlib.sha256(b"job" + self.cookie).hexdigest()[:12]

    @property
    def capacity(self) -> int:
        """Number of slots: the ranks of the start plus spare ones, at most as many as a view holds."""
        return max(self.world, min(self.world + self.agreement.spare_ranks, _MOST_SLOTS))


def agree(cards: Sequence[Card]) -> Agreement:
    """Derives a job's common settings from the first card of every rank."""
    receive_buffer = min(card.receive_buffer for card in cards)
    datagram_bytes = min(card.datagram_bytes for card in cards)
    if not any(card.chosen for card in cards):
        credit = receive_buffer // max(len(cards) - 1, 1)
        datagram_bytes = min(datagram_bytes, max(credit // _DATAGRAMS_PER_CREDIT, _SMALLEST_DATAGRAM))
    return Agreement(
        datagram_bytes=datagram_bytes,
        receive_buffer=receive_buffer,
        eager_bytes=min(card.eager_bytes for card in cards),
        checks_data=any(card.checks_data for card in cards),
        trip_bytes=_LOOPBACK_TRIP_BYTES if all(card.loopback for card in cards) else _TRIP_BYTES,
        spare_ranks=min(card.spare_ranks for card in cards),
        lanes=agree_lanes(cards),
        low=agree_low(cards),
    )


def agree_low(cards: Sequence[Card]) -> bool:
    """Whether the ranks of a job have a low-priority lane.

    Raises:
        ValueError: Only some of them have one.
    """
    without = [rank for rank, card in enumerate(cards) if not card.low]
    if 0 < len(without) < len(cards):
        ranks = f"rank{'s' * (len(without) > 1)} {', '.join(map(str, without[:8]))}"
        raise ValueError(f'priority must be "both" in the Options of all ranks or of none: {ranks} did not set it')
    return not without


def agree_lanes(cards: Sequence[Card]) -> int:
    """Derives a job's number of lanes: the least of any rank, by its option, or by its cores and interface speed."""
    fewest = min(1 + len(card.lanes) for card in cards)
    ranks = Counter(card.machine for card in cards)
    for card in cards:
        if not card.cores:  # the user set `lanes`
            continue
        if not card.machine:
            return 1
        fewest = min(
            fewest, lanes_for(card.cores, ranks[card.machine], card.interface_mbit if len(ranks) > 1 else None)
        )
    return fewest


def pack(card: Card) -> bytes:
    """Encodes a card; it fits into one datagram."""
    packed = json.dumps([getattr(card, each.name) for each in fields(card)], separators=(",", ":")).encode()
    if len(packed) > MOST_BYTES:
        raise ValueError(f"a card has at most {MOST_BYTES} bytes, got {len(packed)}: {card}")
    return packed


def unpack(packed: bytes) -> Card:
    """Decodes a card. The bytes are untrusted.

    Raises:
        ValueError: The bytes are no card.
    """
    try:
        values = json.loads(packed) if len(packed) <= MOST_BYTES else None
    except (ValueError, RecursionError):
        values = None
    names = fields(Card)
    if not isinstance(values, list) or len(values) != len(names):
        raise ValueError("these bytes are no card")
    for each, value in zip(names, values, strict=True):
        if type(value) is not (get_origin(each.type) or each.type):
            raise ValueError(f"these bytes are no card: {each.name} is {value!r:.40}")
    card = Card(**{each.name: value for each, value in zip(names, values, strict=True)})
    ipaddress.ip_address(card.host.partition("%")[0])
    _check_paths(card.paths)
    lanes = len(card.lanes) < MOST_LANES and all(type(port) is int and 0 < port <= 0xFFFF for port in card.lanes)
    numbers = (card.receive_buffer, card.eager_bytes, card.spare_ranks, card.cores, card.interface_mbit)
    if not 0 < card.datagram_bytes <= 0xFFFF or not all(0 <= each <= _MOST_NUMBER for each in numbers):
        raise ValueError(f"these bytes are no card: a size is out of range in {card}")
    if not re.fullmatch("[0-9a-f]{32}", card.nonce):
        raise ValueError(f"these bytes are no card: nonce is {card.nonce!r:.40}")
    ports = lanes and 0 < card.port <= 0xFFFF and 0 <= card.reception <= 0xFFFF and 0 <= card.low <= 0xFFFF
    if not ports or not 0 <= card.incarnation <= MOST_INCARNATIONS:
        raise ValueError(f"these bytes are no card: port, reception or incarnation is out of range in {card}")
    return card


def _check_paths(paths: Sequence[object]) -> None:
    if len(paths) >= MOST_PATHS:
        raise ValueError(f"these bytes are no card: {1 + len(paths)} paths")
    for path in paths:
        match path:
            case [str(host), int(port)] if type(port) is int and 0 < port <= 0xFFFF:
                ipaddress.ip_address(host.partition("%")[0])
            case _:
                raise ValueError(f"these bytes are no card: a path is {path!r:.40}")


def publish(store: Store, prefix: str, rank: int, card: Card) -> None:
    """Publishes a card. Cards never change: each incarnation has its own key in the store."""
    store.set(_card_key(prefix, rank, card.incarnation), pack(card).decode())


def card_keys(prefix: str, world: int) -> dict[int, str]:
    """Keys in the store under which the first process of each rank publishes its card."""
    return {rank: _card_key(prefix, rank, 0) for rank in range(world)}


def first_card(store: Store, prefix: str, rank: int) -> Card:
    """Reads the card of a rank's first process; blocks until there is one."""
    return _read(store, _card_key(prefix, rank, 0), rank, 0)


def first_card_if_published(store: Store, prefix: str, rank: int) -> Card | None:
    """Reads the card of a rank's first process, if there is one. Never blocks."""
    key = _card_key(prefix, rank, 0)
    return _read(store, key, rank, 0) if store.check([key]) else None


def known_cards(store: Store, prefix: str, world: int) -> dict[int, Card]:
    """Reads the newest card of each rank that has published one; skips malformed ones. Never blocks."""
    cards: dict[int, Card] = {}
    for rank in range(world):
        try:
            card = first_card_if_published(store, prefix, rank)
            if card is not None:
                cards[rank] = newest_card(store, prefix, rank, 0) or card
        except ValueError as error:
            _log.warning("%s", error)
    return cards


def newest_card(store: Store, prefix: str, rank: int, above: int) -> Card | None:
    """Reads the newest card of a rank with an incarnation above `above`, if there is one. Never blocks."""
    counter = f"{prefix}/incarnations/{rank}"
    try:
        latest = int(store.get(counter)) if store.check([counter]) else 0
    except ValueError:
        raise ValueError(f"the store holds no valid number at {counter}. {ADVICE}") from None
    # A process may have died between taking its incarnation and publishing its card.
    latest = min(latest, MOST_INCARNATIONS)
    for incarnation in range(latest, max(above, latest - _MOST_UNPUBLISHED), -1):
        key = _card_key(prefix, rank, incarnation)
        if store.check([key]):
            return _read(store, key, rank, incarnation)
    return None


def next_incarnation(store: Store, prefix: str, rank: int) -> int:
    """Takes an incarnation for a new process of a rank; no other process ever gets it."""
    incarnation = store.add(f"{prefix}/incarnations/{rank}", 1)
    if incarnation < 1:
        raise ValueError(f"the store gives rank {rank} the incarnation {incarnation}, which is below 1. {ADVICE}")
    if incarnation > MOST_INCARNATIONS:
        raise ValueError(f"rank {rank} has returned {MOST_INCARNATIONS} times, which is the most: start a new job")
    return incarnation


def publish_successor_card(store: Store, prefix: str, rank: int, card: Card) -> None:
    """Publishes the card of a process whose incarnation came from a rank; the store then counts on from it."""
    publish(store, prefix, rank, card)
    counter = f"{prefix}/incarnations/{rank}"
    missing = card.incarnation - store.add(counter, 0)
    if missing > 0:
        store.add(counter, missing)


def fingerprint(key: bytes | None, cookie: bytes) -> str:
    """Hash by which ranks compare keys without revealing them."""
    return "" if key is None else hmac.new(key, b"fingerprint" + cookie, hashlib.sha256).hexdigest()


class LinkKeys:
    """Derives the keys of the links between this process and its peers.

    Every key contains the nonces of both ends, and this process never reads its own nonce from a store. So a forged
    card cannot make it reuse a key: packet numbers may start at 1, and a datagram for another process is rejected.

    Args:
        key: The job's key; None if it has none.
        cookie: The job's cookie.
        rank: This rank.
        card: The card that this process made.
    """

    def __init__(self, key: bytes | None, cookie: bytes, rank: int, card: Card) -> None:
        self._key, self._cookie, self._rank, self._card = key, cookie, rank, card

    def __call__(self, peer: int, card: Card, lane: int) -> bytes:
        """Returns the keys that seal datagrams to a peer and open those from it, 16 bytes each; empty without a key."""
        if self._key is None:
            return b""
        own, other = _end(self._rank, self._card), _end(peer, card)
        return self._derive(lane, own + other) + self._derive(lane, other + own)

    def _derive(self, lane: int, ends: bytes) -> bytes:
        assert self._key is not None
        text = b"link" + self._cookie + struct.pack("<H", lane) + ends
        return hmac.new(self._key, text, hashlib.sha256).digest()[:16]


def _end(rank: int, card: Card) -> bytes:
    return struct.pack("<HI", rank, card.incarnation) + bytes.fromhex(card.nonce)


def _read(store: Store, key: str, rank: int, incarnation: int) -> Card:
    """Reads a card. Any process that reaches the store may write anything there."""
    try:
        card = unpack(bytes(store.get(key)))
        if card.incarnation != incarnation:
            raise ValueError(f"these bytes are the card of process {card.incarnation}")
    except ValueError as error:
        raise ValueError(f"the store holds no valid card of rank {rank} at {key}: {error}. {ADVICE}") from None
    return card


def _card_key(prefix: str, rank: int, incarnation: int) -> str:
    return f"{prefix}/card/{rank}" if incarnation == 0 else f"{prefix}/card/{rank}/{incarnation}"

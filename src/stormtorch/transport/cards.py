"""What ranks publish about themselves in a store, and what follows from it for all of them."""

import hashlib
import hmac
import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from torch.distributed.distributed_c10d import Store

# Enough credit per peer for a few datagrams in flight: with many ranks, large datagrams would each fill a share.
_DATAGRAMS_PER_CREDIT = 4
_SMALLEST_DATAGRAM = 1472
# A trip over loopback costs a wake-up or two, in which a core copies so much; elsewhere, take 1 Gbit/s and 0.1 ms.
_LOOPBACK_TRIP_BYTES = 128 << 10
_TRIP_BYTES = 16 << 10
_MOST_INCARNATIONS = 0xFFFF  # 16 bits of every check and nonce


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """One process of a rank: where it is and what it asks for."""

    host: str
    port: int
    datagram_bytes: int
    chosen: bool
    """Whether somebody asked for that size, or it is the interface's."""
    receive_buffer: int
    eager_bytes: int
    loopback: bool
    checks_data: bool
    nonce: str
    """Random: makes the keys of this process its own."""
    fingerprint: str
    """Of the job key, by which ranks notice that theirs differ."""
    incarnation: int = 0
    """How many processes of this rank went before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """What is the same on every rank for as long as the job runs. It follows from the first processes' cards."""

    datagram_bytes: int
    receive_buffer: int
    eager_bytes: int
    checks_data: bool
    trip_bytes: int


def agree(cards: Sequence[Card]) -> Agreement:
    """The agreement of a job, from the first card of every rank."""
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
    )


def publish(store: Store, prefix: str, rank: int, card: Card) -> None:
    """Shows a card to the others. Cards are never changed: each process of a rank has a place of its own."""
    store.set(_place(prefix, rank, card.incarnation), json.dumps(asdict(card)))


def places(prefix: str, world: int) -> dict[int, str]:
    """Where the card of each rank's first process will be."""
    return {rank: _place(prefix, rank, 0) for rank in range(world)}


def first(store: Store, prefix: str, rank: int) -> Card:
    """The card of a rank's first process; blocks until there is one."""
    return Card(**json.loads(store.get(_place(prefix, rank, 0))))


def newest(store: Store, prefix: str, rank: int, above: int) -> Card | None:
    """The newest card of a rank with an incarnation above this one, if there is any. Never blocks."""
    counter = f"{prefix}/incarnations/{rank}"
    latest = int(store.get(counter)) if store.check([counter]) else 0
    # A process may have died between taking its number and publishing its card.
    for incarnation in range(latest, above, -1):
        place = _place(prefix, rank, incarnation)
        if store.check([place]):
            return Card(**json.loads(store.get(place)))
    return None


def next_incarnation(store: Store, prefix: str, rank: int) -> int:
    """A number for a new process of a rank, which no other ever gets."""
    incarnation = store.add(f"{prefix}/incarnations/{rank}", 1)
    if incarnation > _MOST_INCARNATIONS:
        raise ValueError(f"rank {rank} has returned {_MOST_INCARNATIONS} times: begin a new job")
    return incarnation


def fingerprint(key: bytes | None, cookie: bytes) -> str:
    """Tells keys apart and nothing else."""
    return "" if key is None else hmac.new(key, b"fingerprint" + cookie, hashlib.sha256).hexdigest()


def derive_key(key: bytes | None, cookie: bytes, rank: int, card: Card) -> bytes:
    """A key of its own for each sender and process, so that packet numbers may start at one; empty without a key."""
    if key is None:
        return b""
    text = b"sender" + cookie + struct.pack("<H", rank) + card.nonce.encode()
    return hmac.new(key, text, hashlib.sha256).digest()[:16]


def _place(prefix: str, rank: int, incarnation: int) -> str:
    return f"{prefix}/card/{rank}" if incarnation == 0 else f"{prefix}/card/{rank}/{incarnation}"

"""An attacker's store that forges values, and a wire that records and modifies datagrams."""

from __future__ import annotations

import ctypes
import json
import select
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple

from torch._C._distributed_c10d import HashStore  # torch.distributed has it, but its types do not

from stormtorch import Options, connect
from stormtorch._engine import crc32c_at
from stormtorch.udp.cards import Card, pack, unpack
from stormtorch.udp.udp import UdpTransport

HEADER_BYTES = 32
_FLAGS, _SOURCE, _CHECK, _COOKIE, _NUMBER = slice(1, 2), slice(2, 4), slice(4, 8), slice(8, 12), slice(12, 16)
_SEALED = 8

Tamper = Callable[[str, bytes], bytes | None]
"""Returns what is shown under a key instead of what was written there; None shows nothing."""


class TamperingStore:
    """One rank's view of a store whose owner lies. What the rank writes arrives.

    Args:
        store: The store itself.
        lie: What this rank is shown.
        timeout_s: Longest time of a wait for a key.
    """

    def __init__(self, store: HashStore, lie: Tamper, timeout_s: float = 2.0) -> None:
        self._store, self._lie = store, lie
        self.timeout = timedelta(seconds=timeout_s)

    def set(self, key: str, value: str) -> None:
        """Writes a value."""
        self._store.set(key, value)

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter, and shows it as the lie has it."""
        shown = self._lie(key, str(self._store.add(key, amount)).encode())
        return 0 if shown is None else int(shown)

    def get(self, key: str) -> bytes:
        """Returns what the lie makes of a value."""
        shown = self._lie(key, bytes(self._store.get(key))) if self._store.check([key]) else self._lie(key, b"")
        if not shown:
            self._store.wait([f"{key}, which never comes"], self.timeout)
        return shown or b""

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are shown."""
        there = ((key, self._store.check([key])) for key in keys)
        return all(self._lie(key, bytes(self._store.get(key)) if has else b"") for key, has in there)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Waits until all keys are there."""
        self._store.wait(list(keys), timeout or self.timeout)


class Datagram(NamedTuple):
    """What was seen on the wire."""

    source: int
    target: int
    data: bytes

    @property
    def name(self) -> tuple[int, int, bytes]:
        """Unique identity: sender, receiver, packet number."""
        return self.source, self.target, self.data[_NUMBER]

    @property
    def is_data(self) -> bool:
        """Whether it holds a chunk."""
        return self.data[0] & 15 == 1

    @property
    def payload(self) -> bytes:
        """What stands behind the header."""
        return self.data[HEADER_BYTES:]


Tap = Callable[[Datagram], bytes | None]
"""Returns what is passed on instead of a datagram, or None to lose it."""


class TappedNetwork:
    """Stands between the ranks of a job: cards in their stores name its sockets instead of their own.

    Args:
        world: Number of ranks.
    """

    def __init__(self, world: int) -> None:
        self.seen: list[Datagram] = []
        self.tap: Tap = lambda datagram: datagram.data
        self._sockets = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(world)]
        for each in self._sockets:
            each.bind(("127.0.0.1", 0))
            each.setblocking(False)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        self.addresses: dict[int, tuple[str, int]] = {}
        """Where the ranks really are."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._carry, name="wire", daemon=True)
        self._thread.start()

    def view_of(self, rank: int, lie: Tamper) -> Tamper:
        """Adds to what a rank is shown: other ranks are behind this wire."""

        def shown(key: str, value: bytes) -> bytes | None:
            told = lie(key, value)
            if not told or "/card/" not in key:
                return told
            of = int(key.partition("/card/")[2].split("/")[0])
            try:
                card = unpack(told)
            except ValueError:
                return told
            self.addresses.setdefault(of, (card.host, card.port))
            if of == rank:
                return told
            return pack(replace(card, port=self._sockets[of].getsockname()[1]))

        return shown

    def send(self, source: int, target: int, data: bytes) -> None:
        """Sends any bytes to a rank, from the address at which it knows another."""
        self._sockets[source].sendto(data, self.addresses[target])

    def close(self) -> None:
        """Drops all datagrams from now on."""
        self._over.set()
        self._thread.join(10.0)
        for each in self._sockets:
            each.close()

    def _carry(self) -> None:
        while not self._over.is_set():
            ready, _, _ = select.select(self._sockets, [], [], 0.05)
            for each in ready:
                self._pass_on(each, self._sockets.index(each))

    def _pass_on(self, arrives: socket.socket, target: int) -> None:
        try:
            data = arrives.recv(1 << 16)
        except OSError:
            return
        source = int.from_bytes(data[_SOURCE], "little")
        if len(data) < HEADER_BYTES or source >= len(self._sockets) or target not in self.addresses:
            return
        datagram = Datagram(source, target, data)
        self.seen.append(datagram)
        passed = self.tap(datagram)
        if passed is not None:
            self.send(source, target, passed)

    def __enter__(self) -> TappedNetwork:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def honest(_key: str, value: bytes) -> bytes | None:
    """Returns written values."""
    return value or None


def on_ranks(
    world: int,
    work: Callable[[UdpTransport], Any],
    options: Options,
    *,
    lies: dict[int, Tamper] | None = None,
    wire: TappedNetwork | None = None,
    store: HashStore | None = None,
    absent: Sequence[int] = (),
    within_s: float = 60.0,
) -> list[Any]:
    """Calls `work(transport)` on each rank, a thread of its own. Returns results, or the errors instead of them."""
    store = store or HashStore()
    said: list[Any] = [None] * world

    def body(rank: int) -> None:
        lie = (lies or {}).get(rank, honest)
        view: Any = TamperingStore(store, lie if wire is None else wire.view_of(rank, lie))
        try:
            with connect(view, rank, world, options) as transport:
                said[rank] = work(transport)
        except Exception as error:
            said[rank] = error

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(world) if rank not in absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(within_s)
        assert not thread.is_alive(), "a rank hangs"
    return said


def entries(store: HashStore, world: int, prefix: str = "storm") -> dict[str, bytes]:
    """What a job has left in its store, for an attacker to show it to another."""
    keys = [f"{prefix}/start", f"{prefix}/cookie", *(f"{prefix}/card/{rank}" for rank in range(world))]
    return {key: bytes(store.get(key)) for key in keys}


def changed(packed: bytes, **changes: Any) -> bytes:
    """A card with other values in it, whether they make sense or not."""
    names = list(Card.__dataclass_fields__)
    values = json.loads(packed)
    for name, value in changes.items():
        values[names.index(name)] = value
    return json.dumps(values).encode()


def forge(datagram: Datagram, cookie: bytes, *, payload: bytes) -> bytes:
    """A datagram with another content, and the check of who knows the cookie but no key."""
    secret = int(cookie, 16)
    header = bytearray(datagram.data[:HEADER_BYTES])
    header[_FLAGS] = bytes([header[1] & ~_SEALED])
    header[_COOKIE] = (secret & 0xFFFFFFFF).to_bytes(4, "little")
    header[_CHECK] = _check(datagram.target, header, payload, secret >> 32).to_bytes(4, "little")
    return bytes(header) + payload


def cookie_of(datagram: Datagram) -> bytes:
    """The cookie, as one datagram shows it that is not sealed: the check is linear in the half that is hidden."""
    header, payload = datagram.data[:HEADER_BYTES], datagram.payload
    nothing = _check(datagram.target, header, payload, 0)
    # Sets of bits of the hidden half, and what each changes in the check; each with a highest bit of its own.
    rows: dict[int, tuple[int, int]] = {}
    for bit in range(32):
        row = _reduced((1 << bit, _check(datagram.target, header, payload, 1 << bit) ^ nothing), rows)
        rows[row[1].bit_length()] = row
    hidden, left = _reduced((0, int.from_bytes(header[_CHECK], "little") ^ nothing), rows)
    assert left == 0, "the check is a function of the hidden half that can be turned round"
    return f"{hidden << 32 | int.from_bytes(header[_COOKIE], 'little'):016x}".encode()


def _reduced(row: tuple[int, int], rows: dict[int, tuple[int, int]]) -> tuple[int, int]:
    bits, change = row
    while change.bit_length() in rows:
        others, its_change = rows[change.bit_length()]
        bits, change = bits ^ others, change ^ its_change
    return bits, change


def _check(target: int, header: bytes | bytearray, payload: bytes, hidden: int) -> int:
    """Check of a datagram between first processes, as docs/protocol.md has it."""
    marked = bytearray(header)
    marked[_CHECK] = (target * 0xC2B2AE35 & 0xFFFFFFFF).to_bytes(4, "little")
    check = hidden
    for part in (payload, bytes(marked)):
        held = ctypes.create_string_buffer(part, len(part))
        check = crc32c_at(ctypes.addressof(held), len(part), check)
    return check

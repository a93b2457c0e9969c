"""NAT traversal: each rank publishes in the store the addresses at which it observes the others.

A reachable rank learns the external address of a rank behind a router from its datagrams, and writes it into the store.
Two ranks behind two routers read each other's address there, and both send to it: the datagrams of one open the other's
router (hole punching). The engine moves to an address only after it has answered a challenge
(engine/paths/routes.hpp), so nothing in the store has to be trusted.
"""

from __future__ import annotations

import atexit
import ipaddress
import json
import logging
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stormtorch.errors import Unreachable
from stormtorch.udp.addresses import Address
from stormtorch.udp.cards import Card

_log = logging.getLogger("stormtorch")
_PRIVATE = [
    ipaddress.ip_network(each)
    for each in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7")
]
# Ranks whose addresses share this many leading bits count as one network.
_NEIGHBOUR_BITS = {4: 16, 6: 64}
_EVERY_S = 0.5
_FIRST_EVERY_S = 0.02

_watchers: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_ending = threading.Event()

ObservedAddresses = dict[int, dict[int, list[Address]]]
"""Addresses by observing rank, observed rank and lane."""


def behind_nat(cards: Iterable[Card]) -> bool:
    """Whether there may be NAT between ranks: `nat` says so, or networks differ and some address is private."""
    cards = list(cards)
    said = {card.nat for card in cards}
    if said & {1, -1}:
        return 1 in said
    hosts = [ipaddress.ip_address(card.host.partition("%")[0]) for card in cards]
    networks = {(each.version, int(each) >> (each.max_prefixlen - _NEIGHBOUR_BITS[each.version])) for each in hosts}
    return len(networks) > 1 and any(each in network for each in hosts for network in _PRIVATE)


class AddressBook:
    """Known addresses of one transport's peers, as observed by this rank and by others."""

    def __init__(self, transport: Any) -> None:
        self._transport = weakref.ref(transport)
        self._rank = transport.rank
        self._store = transport.store
        self._key = f"{transport.prefix}/seen"
        self._published: Mapping[str, Any] = {}
        self._version = 0
        self._lock = threading.Lock()
        self._seen: ObservedAddresses = {}
        self._keepalive_on = False
        self._over = threading.Event()
        for peer, card in transport.cards.items():
            if peer != self._rank:
                transport.endpoint.offer(peer, transport.ports_of(card))  # sends a challenge

    def watch(self) -> None:
        """Starts a thread that calls `look` until the transport is closed or collected."""
        watcher = threading.Thread(target=self._watch, name="whereabouts", daemon=True)
        _watchers.add(watcher)
        watcher.start()

    def stop(self) -> None:
        """Stops the thread: the rank that serves the store may leave before this one."""
        self._over.set()

    def wait_for_peers(self, peers: Sequence[int], timeout_s: float) -> None:
        """Waits until all peers answer.

        Raises:
            Unreachable: A peer does not answer within the timeout, and there is NAT. Without NAT this only logs a
                warning: the first exchange with the peer then fails if it is down.
        """
        give_up_at = time.monotonic() + timeout_s
        while missing := [peer for peer in peers if not self._answers(peer)]:
            self.look()
            if time.monotonic() < give_up_at:
                time.sleep(_FIRST_EVERY_S)
                continue
            peer = missing[0]
            transport = self._transport()
            if transport is None:
                return
            if not self._seen and not any(card.nat == 1 for card in transport.cards.values()):
                _log.warning("rank %d: no answer from rank %d for %g s", self._rank, peer, timeout_s)
                return
            error = Unreachable(
                f"rank {self._rank} and rank {peer} cannot reach each other within {timeout_s:g} s: "
                f"{self._describe(self._rank)}, {self._describe(peer)}. NAT traversal fails if both routers use "
                "another port for each destination (symmetric NAT), or if one does and the other admits only replies: "
                "connect these hosts by a VPN, or give one of them a public address."
            )
            error.culprit = peer
            raise error
        self.look()  # others may need to know at once where this rank sees them

    def look(self) -> None:
        """Publishes the addresses that this rank observes, and challenges those that others have published."""
        transport = self._transport()
        if transport is None or transport.closed:
            return
        with self._lock:
            self._publish(transport)
            version = self._store.add(self._key, 0)
            if version == self._version:
                return
            self._version = version
            self._seen = self._read(transport.world)
            for observer, peers in self._seen.items():
                for peer, lanes in peers.items():
                    if observer != self._rank and peer != self._rank:
                        self._try(transport, peer, lanes)
            if not self._keepalive_on and any(self._rank in peers for peers in self._seen.values()):
                transport.endpoint.enable_keepalive()
                self._keepalive_on = True

    def _publish(self, transport: Any) -> None:
        lanes = transport.endpoint.routes()
        learned = {
            str(peer): [lane[peer][:2] for lane in lanes]
            for peer in transport.cards
            if peer != self._rank and all(lane[peer][2] for lane in lanes) and any(lane[peer][3] for lane in lanes)
        }
        if learned != self._published:
            self._published = learned
            self._store.set(f"{self._key}/{self._rank}", json.dumps(learned))
            self._store.add(self._key, 1)

    def _read(self, world: int) -> ObservedAddresses:
        seen: ObservedAddresses = {}
        for observer in range(world):
            key = f"{self._key}/{observer}"
            if not self._store.check([key]):
                continue
            try:
                observed = json.loads(self._store.get(key))
                seen[observer] = {
                    int(peer): [(str(host), int(port)) for host, port in lanes] for peer, lanes in observed.items()
                }
            # Any process that reaches the store may write anything there.
            except (ValueError, TypeError, AttributeError, RecursionError) as error:
                _log.warning("rank %d: malformed addresses from rank %d in the store: %s", self._rank, observer, error)
        return seen

    @staticmethod
    def _try(transport: Any, peer: int, lanes: list[Address]) -> None:
        try:
            if lanes != [lane[peer][:2] for lane in transport.endpoint.routes()]:
                transport.endpoint.offer(peer, lanes)
        except (ValueError, TypeError, IndexError) as error:
            _log.warning("rank %d: malformed address of rank %d in the store: %s", transport.rank, peer, error)

    def _answers(self, peer: int) -> bool:
        transport = self._transport()
        return transport is None or transport.closed or all(lane[peer][2] for lane in transport.endpoint.routes())

    def _describe(self, rank: int) -> str:
        transport = self._transport()
        card = transport.cards[rank] if transport is not None else None
        own = f"rank {rank} is at {card.host}:{card.port}" if card is not None else f"rank {rank}"
        views = [
            f"seen by rank {observer} at {lanes[0][0]}:{lanes[0][1]}"
            for observer, peers in sorted(self._seen.items())
            for peer, lanes in peers.items()
            if peer == rank and lanes
        ]
        return ", ".join([own, *views])

    def _watch(self) -> None:
        while not self._over.wait(_EVERY_S) and not _ending.is_set() and self._transport() is not None:
            try:
                self.look()
            except RuntimeError as error:  # the store or the transport is gone
                _log.info("rank %d: stops watching the addresses in the store: %s", self._rank, error)
                return


@atexit.register
def _end() -> None:
    """Ends all watchers: no thread may be inside the engine while the interpreter shuts down."""
    _ending.set()
    for watcher in list(_watchers):
        watcher.join(2 * _EVERY_S)

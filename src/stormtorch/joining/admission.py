"""Admission service: answers the join requests of late joiners, and the requests of watchers, on behalf of a rank.

A joiner sends three requests: `learn` returns what all ranks know, `seat` reserves a slot and an incarnation, and `ask`
is the join request, repeated until a view includes the joiner. Nothing here decides about membership: the ranks vote on
each view.

A watcher sends `tell` and receives the records of a rank's training. If it cannot reach a rank, another rank forwards
the request. The records come from `transport.reporter`: this package knows nothing about training.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from stormtorch.errors import NotAdmitted
from stormtorch.udp import rpc
from stormtorch.udp.cards import MOST_INCARNATIONS, Card, JobDescription, pack, unpack
from stormtorch.udp.rpc import MalformedMessage

if TYPE_CHECKING:
    from stormtorch.udp.udp import UdpTransport

# A reserved slot is free again after this time without a join request.
_RESERVATION_S = 30.0
# Heartbeats come every tenth of `silence_s`: a rank that was silent for this fraction of it may be dead.
_QUIET = 0.35
# Requests that this rank forwards at the same time for watchers, and how long each may take to connect and then to be
# answered. Both are low, because joiners need connections too, and watchers do not wait for long.
MOST_FORWARDED_REQUESTS = 3
_FORWARD_TIMEOUT_S = 1.5
_MOST_SINCE = 1 << 62


def answer_before_joining(request: dict[str, Any]) -> dict[str, Any]:
    """Answers on behalf of a process that has not joined the job itself."""
    if request.get("op") not in ("learn", "seat", "ask", "tell"):
        raise MalformedMessage("an unknown request")
    return {"state": "founding"}


class AdmissionService:
    """Answers joiners and watchers on behalf of a transport.

    Args:
        transport: Transport of this rank; held weakly.
        job: Description of the job.
    """

    def __init__(self, transport: UdpTransport, job: JobDescription) -> None:
        self._transport = weakref.ref(transport)
        self._job = job
        self._lock = threading.Lock()
        self._version = version("stormtorch")  # reads a file
        self._forwards = threading.BoundedSemaphore(MOST_FORWARDED_REQUESTS)
        self._reserved: dict[int, tuple[int, float]] = {}  # by slot: highest incarnation given, and when that expires

    def set_transport(self, transport: UdpTransport) -> None:
        """Answers on behalf of another transport of the same rank from now on."""
        self._transport = weakref.ref(transport)

    def answer(self, request: dict[str, Any]) -> dict[str, Any] | bytes:
        """Answers a request, as an object or as encoded JSON. The request is untrusted."""
        transport = self._transport()
        if transport is None or transport.closed:
            return {"state": "over"}
        operation = request.get("op")
        if operation == "tell":
            return self._report(transport, request)
        if transport.leaving:
            return {"state": "over", "others": self._cards(transport)}
        if operation == "learn":
            return self._learn(transport)
        if operation == "seat":
            above = request.get("above", 0)
            return self._reserve_slot(transport, request.get("rank"), above if type(above) is int else 0)
        if operation == "ask":
            return self._join_request(transport, request)
        raise MalformedMessage("an unknown request")

    def status(self) -> str:
        """Returns this rank's status as a few lines of text."""
        transport = self._transport()
        if transport is None or transport.closed:
            return "over\n"
        if transport.reporter is not None:
            return transport.reporter.status()
        return f"rank {transport.rank} of {transport.world}, job {transport.name}: nothing is prepared yet\n"

    def _report(self, transport: UdpTransport, request: dict[str, Any]) -> dict[str, Any] | bytes:
        since, whom = request.get("since", 0), request.get("for", transport.rank)
        if type(since) is not int or type(whom) is not int or not 0 <= since <= _MOST_SINCE:
            raise MalformedMessage("a request without a record number, or for no rank")
        if whom != transport.rank:
            return self._forward(transport, whom, since)
        report: dict[str, Any] = {"next": 0, "more": False}
        lines: list[bytes] = []
        if transport.reporter is not None:
            report, lines = transport.reporter.report(since)
        about = {
            "state": "running",
            "rank": transport.rank,
            "incarnation": transport.incarnation(transport.rank),
            "pid": os.getpid(),
            "members": sorted(self._members(transport)),
            "receptions": {
                str(rank): [card.host, card.reception, card.incarnation]
                for rank, card in dict(transport.cards).items()
                if card.reception
            },
            **report,
        }
        return rpc.with_records(about, lines)

    def _forward(self, transport: UdpTransport, whom: int, since: int) -> dict[str, Any] | bytes:
        """Forwards a request to another rank, for a watcher that cannot reach it."""
        card = transport.cards.get(whom)
        if card is None or not card.reception:
            return {"state": "unreachable", "why": f"rank {transport.rank} knows no address of rank {whom}"}
        if not self._forwards.acquire(blocking=False):
            return {"state": "busy"}
        try:
            # Without "for", so that no request is forwarded twice. The watcher checks the answer, not this rank.
            return rpc.request_bytes(
                (card.host, card.reception),
                {"op": "tell", "since": since},
                key=transport.options.key,
                version=self._version,
                timeout_s=_FORWARD_TIMEOUT_S,
            )
        except (OSError, MalformedMessage, NotAdmitted) as error:
            return {"state": "unreachable", "why": f"rank {transport.rank} cannot reach rank {whom}: {error}"[:300]}
        finally:
            self._forwards.release()

    def _learn(self, transport: UdpTransport) -> dict[str, Any]:
        job, view = self._job, transport.endpoint.view()
        return {
            "state": "running",
            "rank": transport.rank,
            "cookie": job.cookie.decode(),
            "agreement": asdict(job.agreement),
            "prefix": job.prefix,
            "world": job.world,
            "name": transport.name,
            "cards": self._cards(transport),
            "members": [] if view is None else [rank for rank, _ in view.members],
        }

    def _reserve_slot(self, transport: UdpTransport, wanted: object, above: int) -> dict[str, Any]:
        if wanted is None:
            with self._lock:
                free = self._free_slot(transport)
                if free is None:
                    return {"state": "full", "capacity": self._job.capacity}
                return self._reserve(transport, free, above)
        if type(wanted) is not int or not 0 <= wanted < self._job.capacity:
            return {"state": "refused", "why": f"rank {wanted!s:.20} is not below the job's {self._job.capacity} slots"}
        if wanted == transport.rank:
            return {"state": "refused", "why": f"rank {wanted} is alive: its process answers this request"}
        with self._lock:
            return self._reserve(transport, wanted, above)

    def _free_slot(self, transport: UdpTransport) -> int | None:
        """A free slot among those that this rank assigns, or None: no two ranks of a view assign the same slot."""
        members = self._members(transport)
        ranks = sorted(members) or sorted(transport.cards)
        if transport.rank not in ranks:
            return None
        last_received, join_requests = transport.connectivity()["heard_s"], dict(transport.join_requests())
        for slot in range(self._job.world, self._job.capacity):
            if (
                ranks[(slot - self._job.world) % len(ranks)] != transport.rank
                or slot in members
                or slot in join_requests
            ):
                continue
            until = self._reserved.get(slot, (0, 0.0))[1]
            if time.monotonic() >= until and last_received.get(slot, transport.silence_s) >= transport.silence_s:
                return slot
        return None

    def _reserve(self, transport: UdpTransport, slot: int, above: int) -> dict[str, Any]:
        given, _ = self._reserved.get(slot, (0, 0.0))
        known = max(0, above, transport.incarnation(slot), self._members(transport).get(slot, 0), given)
        known = max([known, *(incarnation for rank, incarnation in transport.join_requests() if rank == slot)])
        # No two ranks assign the same incarnation: each uses the numbers that leave its own rank as the remainder.
        number = known + 1 + (transport.rank - known - 1) % self._job.capacity
        if number > MOST_INCARNATIONS:
            return {"state": "refused", "why": f"rank {slot} has returned too often: start a new job"}
        self._reserved[slot] = (number, time.monotonic() + _RESERVATION_S)
        return {"state": "seat", "rank": slot, "incarnation": number}

    def _join_request(self, transport: UdpTransport, request: dict[str, Any]) -> dict[str, Any]:
        rank, incarnation, text = request.get("rank"), request.get("incarnation"), request.get("card")
        if type(rank) is not int or type(incarnation) is not int or not isinstance(text, str):
            raise MalformedMessage("a join request without rank, incarnation or card")
        packed = text.encode()
        card = unpack(packed)
        fits = 0 <= rank < self._job.capacity and rank != transport.rank and 0 < incarnation == card.incarnation
        fits = fits and transport.fits(card)
        if not fits or card.fingerprint != transport.cards[transport.rank].fingerprint:
            raise MalformedMessage("a card that does not fit")
        view = transport.view()
        member = -1 if view is None else dict(view.members).get(rank, -1)
        if member > incarnation or transport.incarnation(rank) > incarnation:
            return {"state": "taken"}
        endpoint = transport.endpoint
        if view is not None and member == incarnation:
            transport.install(view)
            if transport.cards[rank] != card:
                return {"state": "taken"}
            return {"state": "in", "cards": self._cards(transport)}
        transport.watch()  # before the first heartbeat is due, a rank counts as reachable
        connectivity = endpoint.connectivity()
        silent_s = connectivity["heard_s"].get(rank, float("inf"))
        if member >= 0 and silent_s < _QUIET * transport.silence_s and transport.incarnation(rank) < incarnation:
            return {"state": "wait", "why": f"rank {rank} still answers: does its old process still run?"}
        with self._lock:
            given, _ = self._reserved.get(rank, (0, 0.0))
            self._reserved[rank] = (max(incarnation, given), time.monotonic() + _RESERVATION_S)
        endpoint.request_admission(rank, incarnation, packed)
        if connectivity["quorum"]:
            return {"state": "wait", "why": "the ranks have not agreed on a view that includes it yet"}
        if member >= 0 and silent_s > transport.silence_s and transport.incarnation(rank) < incarnation:
            # The remaining ranks are no quorum without the processes that replace the others: this one may exchange
            # messages with them, and vote, before it is a member.
            transport.readmit(rank, card)
        if transport.incarnation(rank) == incarnation:
            return {"state": "knock", "cards": self._cards(transport)}
        return {"state": "wait", "why": f"rank {transport.rank} cannot reach a majority of the ranks itself"}

    def _members(self, transport: UdpTransport) -> dict[int, int]:
        view = transport.endpoint.view()
        return {} if view is None else dict(view.members)

    def _cards(self, transport: UdpTransport) -> dict[str, str]:
        known: dict[int, Card] = dict(transport.cards)
        return {str(rank): pack(card).decode() for rank, card in known.items()}

"""What a rank of a running job answers to processes that want into it, and to those that watch it.

A newcomer first learns what all ranks know (`learn`), then gets a slot and a number (`seat`), and then asks to be let
in until a view includes it (`ask`). Nothing here decides who is in: the ranks agree on that.

Whoever watches the job has ranks tell of their training (`report`). A rank that the watcher cannot reach is asked by one
that it can. `transport.reporter` has the records: this room knows nothing of trainings.
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
from stormtorch.udp import rpc as rpc
from stormtorch.udp.cards import MOST_INCARNATIONS, Card, JobDescription, pack, unpack
from stormtorch.udp.rpc import MalformedMessage

if TYPE_CHECKING:
    from stormtorch.udp.udp import UdpTransport

# A slot that was given away and not asked for again is free after this time.
_RESERVATION_S = 30.0
# Notes come every tenth of `silence_s`: a rank that missed this part of it is no longer taken for alive and well.
_QUIET = 0.35
# Questions that this rank asks others at the same time on behalf of watchers, and how long each may take to connect and
# to be answered: newcomers need seats at the reception, too, and a watcher does not wait for long.
MOST_FORWARDED_REQUESTS = 3
_FORWARD_TIMEOUT_S = 1.5
_MOST_SINCE = 1 << 62


def answer_before_joining(request: dict[str, Any]) -> dict[str, Any]:
    """Answers for a process that is not in a job itself yet."""
    if request.get("op") not in ("learn", "seat", "ask", "tell"):
        raise MalformedMessage("an unknown question")
    return {"state": "founding"}


class AdmissionService:
    """Answers newcomers on behalf of a transport.

    Args:
        transport: Transport of this rank; held weakly.
        job: What all ranks have in common.
    """

    def __init__(self, transport: UdpTransport, job: JobDescription) -> None:
        self._transport = weakref.ref(transport)
        self._job = job
        self._lock = threading.Lock()
        self._version = version("stormtorch")  # reads a file
        self._forwards = threading.BoundedSemaphore(MOST_FORWARDED_REQUESTS)
        self._reserved: dict[int, tuple[int, float]] = {}  # by slot: the highest number given, and until when it counts

    def set_transport(self, transport: UdpTransport) -> None:
        """Answers on behalf of another transport of the same rank from now on."""
        self._transport = weakref.ref(transport)

    def answer(self, request: dict[str, Any]) -> dict[str, Any] | bytes:
        """Answers a question of a newcomer, in words or as JSON. The question may be anything."""
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
        raise MalformedMessage("an unknown question")

    def status(self) -> str:
        """Says in a few lines where this rank stands."""
        transport = self._transport()
        if transport is None or transport.closed:
            return "over\n"
        if transport.reporter is not None:
            return transport.reporter.status()
        return f"rank {transport.rank} of {transport.world}, job {transport.name}: nothing is prepared yet\n"

    def _report(self, transport: UdpTransport, request: dict[str, Any]) -> dict[str, Any] | bytes:
        since, whom = request.get("since", 0), request.get("for", transport.rank)
        if type(since) is not int or type(whom) is not int or not 0 <= since <= _MOST_SINCE:
            raise MalformedMessage("a question without a number, or for no rank")
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
        """Asks another rank on behalf of a watcher who cannot reach it."""
        card = transport.cards.get(whom)
        if card is None or not card.reception:
            return {"state": "unreachable", "why": f"rank {transport.rank} knows no address of rank {whom}"}
        if not self._forwards.acquire(blocking=False):
            return {"state": "busy"}
        try:
            # Without "for": nobody passes a question on twice. The answer is only carried: the watcher checks it.
            return rpc.request_bytes(
                (card.host, card.reception),
                {"op": "tell", "since": since},
                key=transport.options.key,
                version=self._version,
                timeout_s=_FORWARD_TIMEOUT_S,
            )
        except (OSError, MalformedMessage, NotAdmitted) as error:
            return {"state": "unreachable", "why": f"rank {transport.rank} does not reach rank {whom}: {error}"[:300]}
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
            return {"state": "refused", "why": f"rank {wanted!s:.20} is not below {self._job.capacity}"}
        if wanted == transport.rank:
            return {"state": "refused", "why": f"rank {wanted} is the process that was asked, and it is alive"}
        with self._lock:
            return self._reserve(transport, wanted, above)

    def _free_slot(self, transport: UdpTransport) -> int | None:
        """A slot that nobody has, of those that this rank gives away: no two ranks of a view give the same."""
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
        # No two ranks give the same number: each gives those that leave its own rank as the remainder.
        number = known + 1 + (transport.rank - known - 1) % self._job.capacity
        if number > MOST_INCARNATIONS:
            return {"state": "refused", "why": f"rank {slot} has returned too often: start a new job"}
        self._reserved[slot] = (number, time.monotonic() + _RESERVATION_S)
        return {"state": "seat", "rank": slot, "incarnation": number}

    def _join_request(self, transport: UdpTransport, request: dict[str, Any]) -> dict[str, Any]:
        rank, incarnation, text = request.get("rank"), request.get("incarnation"), request.get("card")
        if type(rank) is not int or type(incarnation) is not int or not isinstance(text, str):
            raise MalformedMessage("a question without rank, incarnation or card")
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
        transport.watch()  # a rank that nobody has listened to yet counts as heard until it has had the time to answer
        connectivity = endpoint.connectivity()
        silent_s = connectivity["heard_s"].get(rank, float("inf"))
        if member >= 0 and silent_s < _QUIET * transport.silence_s and transport.incarnation(rank) < incarnation:
            return {"state": "wait", "why": f"rank {rank} is still heard: does its old process still run?"}
        with self._lock:
            given, _ = self._reserved.get(rank, (0, 0.0))
            self._reserved[rank] = (max(incarnation, given), time.monotonic() + _RESERVATION_S)
        endpoint.request_admission(rank, incarnation, packed)
        if connectivity["quorum"]:
            return {"state": "wait", "why": "the ranks have not agreed on it yet"}
        if member >= 0 and silent_s > transport.silence_s and transport.incarnation(rank) < incarnation:
            # Those who are left are too few to agree on anything, unless the processes that took the others' places
            # take part: let this one talk with them before it is in.
            transport.readmit(rank, card)
        if transport.incarnation(rank) == incarnation:
            return {"state": "knock", "cards": self._cards(transport)}
        return {"state": "wait", "why": f"rank {transport.rank} hears no majority of the ranks itself"}

    def _members(self, transport: UdpTransport) -> dict[int, int]:
        view = transport.endpoint.view()
        return {} if view is None else dict(view.members)

    def _cards(self, transport: UdpTransport) -> dict[str, str]:
        known: dict[int, Card] = dict(transport.cards)
        return {str(rank): pack(card).decode() for rank, card in known.items()}

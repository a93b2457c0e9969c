"""Join client (late join): a process sends join requests to any rank of a running job, and to others if it dies."""

import contextlib
import functools
import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from torch._C._distributed_c10d import HashStore  # torch.distributed has it, but its types do not
from torch.distributed.distributed_c10d import Store

import stormtorch._engine as _engine
from stormtorch.errors import NotAdmitted
from stormtorch.exchange.options import MOST_LANES, Options
from stormtorch.joining.admission import answer_before_joining
from stormtorch.joining.starting import bind, open_admission_port, start
from stormtorch.udp import rpc
from stormtorch.udp.addresses import Address
from stormtorch.udp.cards import Agreement, Card, JobDescription, fingerprint, pack, unpack
from stormtorch.udp.rpc import Answer, RpcServer
from stormtorch.udp.udp import UdpTransport

_log = logging.getLogger("stormtorch")

_SHORTEST_NAP_S, _LONGEST_NAP_S = 0.05, 0.5
_WARN_EVERY_S = 10.0
_MOST_PROBES = 16
_MOST_RANKS = 0xFFFF
# Time without any answer after which a join is aborted, unless `timeout_s` is shorter.
_NO_ANSWER_S = 30.0


def admission_addresses(cards: Sequence[Card]) -> list[Address]:
    """Admission ports of these processes."""
    return [(card.host, card.reception) for card in cards if card.reception]


def check_path(who: str, card: Card, agreement: Agreement, others: Sequence[Card]) -> None:
    """Raises ValueError if this process cannot send the job's datagrams; a size that a user chose is not checked."""
    if card.datagram_bytes < agreement.datagram_bytes and not card.chosen and not any(c.chosen for c in others):
        raise ValueError(
            f"{who}: the job's datagrams have {agreement.datagram_bytes} bytes, but the interface of {card.host} "
            f"carries only {card.datagram_bytes}: rejoin from one with at least the MTU that the job started with"
        )


def join_running_job(
    where: Sequence[Address], options: Options, *, rank: int | None = None, store: Store | None = None
) -> UdpTransport:
    """Reserves a slot in a running job. The transport's `enter`, which `prepare` calls, then joins the view.

    It joins only once it is ready to train, because the other ranks wait for every member.

    Args:
        where: Addresses of ranks of the job; one that answers is enough.
        options: Settings of this process. `key` must be the job's; `datagram_bytes`, `eager_bytes`, `check` and
            `spare_ranks` are ignored, as those of the job apply.
        rank: Rank to take over, whose process has died; None takes a free slot.
        store: Store of the job, if it still runs.

    Raises:
        NotAdmitted: No rank answers, or the job refuses this process; the error names addresses and reasons.
    """
    return _JoinClient(where, options, rank, store).join()


class _JoinClient:
    def __init__(self, where: Sequence[Address], options: Options, rank: int | None, store: Store | None) -> None:
        self._addresses = list(dict.fromkeys(where))
        self._options = options
        self._wanted = rank
        self._store = HashStore() if store is None else store
        self._give_up_at = time.monotonic() + options.timeout_s
        self._silent: dict[Address, str] = {}  # addresses that did not answer last time, and why
        self._cards: dict[int, Card] = {}
        self._answer: Answer = answer_before_joining
        self._has_joined = False
        self._warned_at = time.monotonic()

    def join(self) -> UdpTransport:
        learned = self._request({"op": "learn"}, min(_NO_ANSWER_S, self._options.timeout_s))
        if learned.get("state") != "running":
            raise self._refused(learned)
        job = self._job(learned)
        endpoint, card = bind(self._options, job.agreement)
        listener, card = open_admission_port(card, self._options, answer_before_joining)
        card = replace(card, fingerprint=fingerprint(self._options.key, job.cookie))
        check_path("joining", card, job.agreement, list(self._cards.values()))
        # This socket's buffer may be smaller than agreed; the credit that this rank grants then follows it.
        buffer = min(job.agreement.receive_buffer, card.receive_buffer)
        job = replace(job, agreement=replace(job.agreement, receive_buffer=buffer))
        rank, incarnation = self._request_slot(card.incarnation)
        card = replace(card, incarnation=incarnation)
        cards = {each: other for each, other in self._cards.items() if each < job.capacity} | {rank: card}
        transport = start(endpoint, listener, self._store, rank, cards, job, self._options)
        if listener is not None:
            self._answer, listener.answer = (
                listener.answer,
                answer_before_joining,
            )  # it admits no process before it is a member itself
        transport.enter = functools.partial(self._join_view, weakref.ref(transport), rank, card, listener)
        return transport

    def _join_view(
        self, found: Callable[[], UdpTransport | None], rank: int, card: Card, listener: RpcServer | None
    ) -> None:
        """Sends join requests, and waits until a view includes this process."""
        transport = found()
        if transport is None or self._has_joined:
            return
        self._give_up_at = time.monotonic() + self._options.timeout_s
        if self._request_admission(rank, card, transport) == "taken":
            raise NotAdmitted(f"rank {rank}: another process has taken this rank meanwhile: start again")
        self._wait_for_view(transport, rank, card)
        self._has_joined = True
        if listener is not None:
            listener.answer = self._answer

    # --- what it receives -------------------------------------------------------------------------------------------

    def _job(self, learned: dict[str, Any]) -> JobDescription:
        try:
            job = JobDescription(
                cookie=str(learned["cookie"]).encode(),
                agreement=Agreement(**learned["agreement"]),
                prefix=str(learned["prefix"]),
                world=int(learned["world"]),
                name=str(learned["name"]),
            )
            int(job.cookie, 16)
            if not 1 <= job.agreement.lanes <= MOST_LANES or not 1 <= job.world <= _MOST_RANKS:
                raise ValueError(f"{job.agreement.lanes} lanes, {job.world} ranks")
            members = {int(each) for each in learned["members"]}
        except (KeyError, TypeError, ValueError) as error:
            raise NotAdmitted(f"the rank at {self._named()} sent a malformed job description: {error!r}") from error
        self._take(learned)
        # From now on, this process also knows the admission ports of all other ranks; members of the view come first.
        for _, card in sorted(self._cards.items(), key=lambda item: (item[0] not in members, item[0])):
            if card.reception and (card.host, card.reception) not in self._addresses:
                self._addresses.append((card.host, card.reception))
        return job

    def _take(self, answer: Mapping[str, Any]) -> None:
        """Keeps the cards in an answer that are newer than the known ones."""
        received = answer.get("cards", {})
        for text, packed in received.items() if isinstance(received, dict) else ():
            try:
                rank, card = int(text), unpack(str(packed).encode())
            except ValueError as error:
                raise NotAdmitted(f"the rank at {self._named()} sent a malformed card of rank {text!s:.20}") from error
            if rank not in self._cards or card.incarnation > self._cards[rank].incarnation:
                self._cards[rank] = card

    def _request_slot(self, above: int) -> tuple[int, int]:
        """Reserves a slot and an incarnation; each rank assigns a part of the free slots."""
        full = 0
        for _ in range(len(self._addresses)):
            answer = self._request({"op": "seat", "rank": self._wanted, "above": above}, _NO_ANSWER_S)
            if answer.get("state") == "seat":
                return int(answer["rank"]), int(answer["incarnation"])
            if answer.get("state") != "full":
                raise self._refused(answer)
            full = int(answer.get("capacity", 0))
            self._addresses.append(self._addresses.pop(0))
        raise NotAdmitted(
            f"the job at {self._named()} has no free slot among its {full}: start the job with more spare_ranks, or "
            "wait until a rank has left"
        )

    def _request_admission(self, rank: int, card: Card, transport: UdpTransport) -> str:
        """Repeats the join request until a view includes this process, or it may vote before that, or lost the slot."""
        nap_s = _SHORTEST_NAP_S
        while True:
            answer = self._request(_join_request(rank, card), _NO_ANSWER_S)
            state = answer.get("state")
            if state in ("in", "knock", "taken"):
                self._take(answer)
                return str(state)
            if state != "wait":
                raise self._refused(answer)
            self._check_time(rank, str(answer.get("why")))
            if transport.leaving:
                raise SystemExit  # SIGTERM: it has no state to transfer
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _LONGEST_NAP_S)

    def _wait_for_view(self, transport: UdpTransport, rank: int, card: Card) -> None:
        """Waits until this process's own endpoint has the view that includes it."""
        endpoint, packed = transport.endpoint, pack(card)
        transport.watch()
        endpoint.request_admission(rank, card.incarnation, packed)
        nap_s = _SHORTEST_NAP_S
        while not self._is_in(endpoint, rank, card.incarnation):
            endpoint.wait_view(0, nap_s)
            nap_s = min(2 * nap_s, _LONGEST_NAP_S)
            self._check_time(rank, "it has a slot, but receives nothing from the other ranks")
            if transport.leaving:
                raise SystemExit  # SIGTERM: it has no state to transfer
            # Other joiners may have come meanwhile: without a quorum they learn of each other by join requests alone.
            for address in list(self._addresses):
                with contextlib.suppress(OSError, rpc.MalformedMessage):
                    answer = self._rpc(address, _join_request(rank, card))
                    if answer.get("state") == "taken":
                        raise NotAdmitted(f"rank {rank}: another process has taken this rank meanwhile: start again")
                    self._take(answer)
            for peer, other in self._cards.items():
                if peer != rank and peer < transport.capacity and other.incarnation > transport.incarnation(peer):
                    transport.readmit(peer, other)

    def _is_in(self, endpoint: _engine.Endpoint, rank: int, incarnation: int) -> bool:
        view = endpoint.view()
        return view is not None and endpoint.inside() and (rank, incarnation) in map(tuple, view.members)

    # --- requests ---------------------------------------------------------------------------------------------------

    def _request(self, request: dict[str, Any], wait_limit_s: float) -> dict[str, Any]:
        """Sends a request to the first address that answers; those that do not move to the end of the list.

        Raises:
            NotAdmitted: No address has answered for `wait_limit_s`.
        """
        give_up_at = min(time.monotonic() + wait_limit_s, self._give_up_at)
        while True:
            for address in list(self._addresses):
                try:
                    answer = self._rpc(address, request)
                except (OSError, rpc.MalformedMessage) as error:
                    self._silent[address] = str(error) or type(error).__name__
                    self._addresses.remove(address)
                    self._addresses.append(address)
                    continue
                if answer.get("state") not in ("founding", "over"):
                    return answer
                self._silent[address] = "it has not joined yet" if answer["state"] == "founding" else "it is leaving"
                self._take({"cards": answer.get("others", {})})
            if time.monotonic() >= give_up_at or (request["op"] == "learn" and self._all_refuse()):
                raise NotAdmitted(
                    "no rank of the job answers: "
                    + "; ".join(f"{host}:{port}: {why}" for (host, port), why in self._silent.items())
                    + ". Does it still run, and does every firewall admit TCP to its ports?"
                )
            time.sleep(_LONGEST_NAP_S)

    def _rpc(self, address: Address, request: dict[str, Any]) -> dict[str, Any]:
        answer = rpc.request(address, request, key=self._options.key, version=version("stormtorch"))
        self._silent.pop(address, None)
        return answer

    def _all_refuse(self) -> bool:
        """Whether every address refuses the connection: the machine runs, but the process does not, so do not wait."""
        return all("refused" in self._silent.get(each, "") for each in self._addresses)

    def _check_time(self, rank: int, why: str) -> None:
        now = time.monotonic()
        if now >= self._give_up_at:
            raise NotAdmitted(f"rank {rank}: not admitted within {self._options.timeout_s:g} s (timeout_s): {why}")
        if now >= self._warned_at + _WARN_EVERY_S:
            self._warned_at = now
            _log.warning("rank %d: waits for admission to the job: %s", rank, why)

    def _refused(self, answer: Mapping[str, Any]) -> NotAdmitted:
        return NotAdmitted(f"the job at {self._named()} refuses this process: {answer.get('why', answer.get('state'))}")

    def _named(self) -> str:
        host, port = next(iter(each for each in self._addresses if each not in self._silent), self._addresses[0])
        return f"{host}:{port}"


def _join_request(rank: int, card: Card) -> dict[str, Any]:
    return {"op": "ask", "rank": rank, "incarnation": card.incarnation, "card": pack(card).decode()}


def probe(where: Sequence[Address], options: Options, prefix: str) -> dict[Address, str]:
    """Requests the state of several processes at once: "running", "founding" or "over"; omits those without an answer.

    Args:
        where: Admission ports of a job's processes.
        options: Settings of this process.
        prefix: Prefix of that job. Processes of other jobs that have the same address by now are omitted too.
    """

    def state(address: Address) -> str | None:
        try:
            answer = rpc.request(address, {"op": "learn"}, key=options.key, version=version("stormtorch"))
        except (OSError, rpc.MalformedMessage):
            return None
        if answer.get("state") == "running" and answer.get("prefix") != prefix:
            return None
        return str(answer.get("state"))

    if not where:
        return {}
    with ThreadPoolExecutor(min(len(where), _MOST_PROBES), "probe") as pool:
        states = dict(zip(where, pool.map(state, where), strict=True))
    return {address: received for address, received in states.items() if received is not None}

"""The transport over a real network: one UDP socket and one native engine per rank."""

import contextlib
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Any, NamedTuple, Protocol

from torch.distributed.distributed_c10d import Store

import stormtorch._engine as _engine
from stormtorch.errors import Closed, ExchangeTimeout, PeerFailed, PeerLeft
from stormtorch.exchange.channels import Channels
from stormtorch.exchange.exchange import ExchangeResult, Plan, conclude
from stormtorch.exchange.options import Options
from stormtorch.exchange.reliability import Priority
from stormtorch.exchange.views import EndpointMembership
from stormtorch.exchange.waiting import (
    FIRST_SLICE_S,
    INTERRUPT_SLICE_S,
    SLICE_S,
    UNCLEAR_S,
    CollectiveServers,
    CurrentWait,
    Interruption,
    LongWait,
    in_background,
    serves_collectives,
)
from stormtorch.udp.address_book import AddressBook
from stormtorch.udp.addresses import from_here
from stormtorch.udp.cards import Card, unpack
from stormtorch.udp.leaving import why_left
from stormtorch.udp.roaming import Roaming
from stormtorch.udp.rpc import RpcServer
from stormtorch.udp.shared_memory import SharedMemorySetup
from stormtorch.udp.view_installer import install_views

_log = logging.getLogger("stormtorch")


class RequestHandler(Protocol):
    """Answers requests of processes outside the job: see `stormtorch.joining.admission`."""

    def answer(self, request: dict[str, Any]) -> dict[str, Any] | bytes:
        """Answers a request."""
        ...

    def status(self) -> str:
        """Returns this rank's status as a few lines of text."""
        ...

    def set_transport(self, transport: "UdpTransport") -> None:
        """Answers on behalf of another transport of the same rank from now on."""
        ...


class StatusReporter(Protocol):
    """Reports the training to watchers: see `stormtorch.runtime.recording.recorder`."""

    def report(self, since: int) -> tuple[dict[str, Any], list[bytes]]:
        """Returns fields for the answer, among them the number to request next, and the JSON records from `since`."""
        ...

    def status(self) -> str:
        """Returns this rank's status as a few lines of text."""
        ...


class Path(NamedTuple):
    """One path to a peer: an interface of this rank and one of the peer."""

    up: bool
    """False while the peer answers on another path but not on this one."""
    round_trip_s: float
    loss: float
    """Loss of what the peer sent over this path."""
    bytes_per_s: float
    """Rate at which this rank sends over this path."""
    bytes_sent: int
    bytes_received: int
    outages: int
    """How often it went down."""


class UdpExchange:
    """An exchange over UDP."""

    __slots__ = ("_endpoint", "_id", "_outcome", "_transport", "plan")

    def __init__(self, transport: "UdpTransport", plan: Plan, exchange_id: int) -> None:
        self._transport = transport
        self._endpoint = transport.endpoint
        self.plan = plan
        self._id = exchange_id
        self._outcome: _engine.Outcome | None = None

    def wait(self, timeout_s: float | None = None) -> ExchangeResult:
        """Blocks until the exchange has ended; its tensors then belong to the caller again."""
        transport = self._transport
        if self._outcome is None and self._superseded:
            raise Closed(f"rank {transport.rank}: {self.plan.what}: ended when this rank was cut off and rejoined")
        if self._outcome is None:
            self._outcome = transport.wait(self._id, self.plan, timeout_s)
        try:
            return conclude(self._outcome, self.plan, transport.rank, transport.silence_s, self.plan.timeout_s)
        except (PeerLeft, PeerFailed) as error:
            why = "" if error.culprit is None else why_left(transport, error.culprit)
            if why:
                told = type(error)(f"{error} Rank {error.culprit} left after an exception: {why}")
                told.culprit = error.culprit
                raise told from None
            raise

    def done(self) -> bool:
        """Whether the exchange, or its transport, has ended."""
        transport = self._transport
        over = self._outcome is not None or transport.closed or transport.inherited or self._superseded
        return over or transport.endpoint.ended(self._id)

    def __del__(self) -> None:
        if self._outcome is None and not self._superseded:
            self._transport.orphan(self._id)

    def cancel(self) -> None:
        """Cancels the exchange; wait() then raises `Closed`."""
        if not self._superseded and not self._transport.inherited:
            self._endpoint.cancel(self._id)

    @property
    def _superseded(self) -> bool:
        """Whether the transport now has another endpoint, where this exchange's number means another exchange."""
        return self._endpoint is not self._transport.endpoint


class UdpTransport(EndpointMembership):
    """A rank's endpoint on a real network. Made by `stormtorch.connect`."""

    def __init__(
        self,
        endpoint: _engine.Endpoint,
        *,
        rank: int,
        world: int,
        capacity: int,
        chunk_bytes: int,
        trip_bytes: int,
        silence_s: float,
        timeout_s: float,
        linger_s: float,
        options: Options,
        store: Store,
        prefix: str,
        cards: Mapping[int, Card],
        keys_of: Callable[[int, Card, int], bytes],
    ) -> None:
        self.endpoint = endpoint
        self.rank = rank
        self.world = world
        self.capacity = capacity
        self.chunk_bytes = chunk_bytes
        self.trip_bytes = trip_bytes
        self.silence_s = silence_s
        self.timeout_s = timeout_s
        self.channels = Channels()
        self.collective_servers = CollectiveServers()
        self.closed = False
        # Returning peers publish their cards there. The store still belongs to the caller.
        self.store = store
        self.prefix = prefix
        self.options = options
        self.name, self.job = "world", ""
        self.cards = dict(cards)
        self.leaving = self.leaves_later = False
        self.resting: Callable[[], bool] = lambda: True
        """Returns whether this rank could transfer its state now."""
        self.on_leave: list[Callable[[], None]] = []
        self.on_close: list[Callable[[str], object]] = []
        """Called, before this transport is closed, with the reason: "done", "left", or the text of an error."""
        self.why = ""
        """Reason for which this transport is about to be closed; empty if none is known."""
        self.reporter: StatusReporter | None = None
        """Reports the training on this transport; None until a model is prepared."""
        self.address_book: AddressBook | None = None
        """Addresses of the peers as other ranks observe them; None without NAT."""
        self.roaming: Roaming | None = None
        """Follows the addresses of this host; None on loopback."""
        self.waits: CurrentWait | None = None
        """The call in which this rank has been blocked for some time."""
        self._listener: RpcServer | None = None
        self._reception: RequestHandler | None = None
        self._shared_memory: SharedMemorySetup | None = None
        self._lock = threading.RLock()
        self.keys_of = keys_of
        self._linger_s = linger_s
        # A process forked from this one has a copy of all this, but not its threads, and it is not in the job.
        self._owner = os.getpid()
        # The engine reads and writes a plan's tensors until its exchange ends, even if the caller drops the exchange.
        self._plans: dict[int, Plan] = {}
        self._orphans: list[int] = []

    @property
    def inherited(self) -> bool:
        """Whether this process was forked from the one that joined the job, and so must leave the transport alone."""
        return os.getpid() != self._owner

    def check_owner(self, what: str) -> None:
        """Raises `Closed` in a process that was forked from the one that joined the job."""
        if self.inherited:
            raise Closed(
                f"rank {self.rank}: {what}: process {os.getpid()} was forked from process {self._owner}, which is the "
                "rank, and is not in the job. Make this call in the parent; a process that is to be another rank must "
                "be spawned, or forked before the group is made."
            )

    def post(self, plan: Plan) -> UdpExchange:
        """Begins an exchange and returns at once. The plan's memory belongs to the engine until the exchange ends."""
        self.check_owner(plan.what)
        if plan.timeout_s is None:
            plan.timeout_s = self.timeout_s
        try:
            exchange_id = self.endpoint.post(*plan.arguments(), low=plan.low)
        except RuntimeError as error:
            raise Closed(f"rank {self.rank}: {plan.what}: {error}") from error
        self._plans[exchange_id] = plan
        if self._orphans:
            self._sweep()
        return UdpExchange(self, plan, exchange_id)

    def low_lane(self, priority: Priority | None) -> bool:
        """Whether exchanges of a priority use the low-priority lane; None is the job's own priority.

        Raises:
            ValueError: The job has no such priority.
        """
        if priority not in (None, "normal", "low"):
            raise ValueError(f'priority must be "normal", "low" or None, got {priority!r}')
        own = "low" if self.options.is_low else "normal"
        if priority in (None, own):
            return False
        if priority == "low" and self.endpoint.low:
            return True
        raise ValueError(
            f'priority must be None or "{own}" in this job, got "{priority}": a job that begins with '
            'Options(priority="both"), on all ranks, has both'
        )

    def wait(self, exchange_id: int, plan: Plan, timeout_s: float | None) -> _engine.Outcome:
        """Blocks until an exchange has ended; to be called once for each exchange."""
        self.check_owner(plan.what)
        outcome = self._wait(exchange_id, plan, timeout_s)
        if outcome is None:
            raise ExchangeTimeout(f"rank {self.rank}: {plan.what} is not done after {timeout_s} s")
        self._plans.pop(exchange_id, None)
        return outcome

    def _wait(self, exchange_id: int, plan: Plan, timeout_s: float | None) -> _engine.Outcome | None:
        def wait(seconds: float | None) -> _engine.Outcome | None:
            try:
                return self.endpoint.wait(exchange_id, seconds)
            except RuntimeError as error:
                raise Closed(f"rank {self.rank}: {plan.what}: {error}") from error

        if not serves_collectives() and plan.interrupted is None:
            return wait(timeout_s)
        give_up_at = math.inf if timeout_s is None else time.monotonic() + timeout_s
        outcome = wait(max(min(FIRST_SLICE_S, give_up_at - time.monotonic()), 0.0))
        if outcome is not None or time.monotonic() >= give_up_at:
            return outcome
        slice_s = SLICE_S if plan.interrupted is None else INTERRUPT_SLICE_S
        long_wait = LongWait(self, {each.peer for each in plan.sends} | {each.peer for each in plan.receives})
        interruption = Interruption()
        try:
            while outcome is None and time.monotonic() < give_up_at:
                if (
                    plan.interrupted is not None
                    and plan.interrupted()
                    and self._should_abort(exchange_id, interruption)
                ):
                    plan.stopped = True
                    self.endpoint.cancel(exchange_id)
                    return wait(None)
                long_wait.look()
                outcome = wait(max(min(slice_s, give_up_at - time.monotonic()), 0.0))
        finally:
            long_wait.end()
        return outcome

    def _should_abort(self, exchange_id: int, interruption: Interruption) -> bool:
        peers = [peer for peer in tuple(self.cards) if peer != self.rank]
        longest_trip_s = max((round_trip_s for round_trip_s, *_ in self.endpoint.links(peers)), default=0.0)
        can_complete = self.endpoint.can_complete(exchange_id)
        return interruption.should_abort(can_complete, time.monotonic(), UNCLEAR_S + 4.0 * longest_trip_s)

    def in_background(self, task: Callable[[], None]) -> Callable[[], None]:
        """Wraps a task so that another thread may call it once and wait for exchanges while the rank goes on."""

        def body() -> None:
            with in_background():
                task()

        return body

    def wait_future(self, future: Future[Any], peers: Collection[int] = ()) -> None:
        """Blocks until a future is done. As in a wait for an exchange, the rank serves collectives meanwhile."""
        wait_for([future], FIRST_SLICE_S if serves_collectives() else None)
        if future.done():
            return
        long_wait = LongWait(self, peers)
        try:
            while not future.done():
                long_wait.look()
                wait_for([future], SLICE_S)
        finally:
            long_wait.end()

    def peek(self, channel: int, seq: int) -> list[tuple[int, bytes]]:
        """Ranks that have begun an exchange that this rank has not posted, and the first chunk of each."""
        self.check_owner("peek")
        return self.endpoint.peek(channel, seq)

    def orphan(self, exchange_id: int) -> None:
        """Marks an exchange that no caller will wait for; its tensors are released some time after it has ended."""
        self._orphans.append(exchange_id)

    def _sweep(self) -> None:
        orphans, self._orphans = self._orphans, []
        for exchange_id in orphans:
            if not self.endpoint.ended(exchange_id):
                self._orphans.append(exchange_id)
            elif self._plans.pop(exchange_id, None) is not None:
                with contextlib.suppress(RuntimeError):  # a lane has failed: callers that wait get the error
                    self.endpoint.wait(exchange_id, 0.0)

    def incarnation(self, peer: int) -> int:
        """Number of a rank's process, as this rank knows it: 0 is the first, and -1 stands for a free slot."""
        return self.cards[peer].incarnation if peer in self.cards else -1

    def machine_of(self, rank: int) -> str:
        """Identity of a rank's machine: ranks with the same one are on one host. Empty if unknown."""
        return self.cards[rank].machine if rank in self.cards else ""

    def readmit(self, peer: int, card: Card) -> None:
        """Accepts the new process of a peer's rank.

        The link to the peer is reset. In exchanges under way, the peer counts as silent: lossy exchanges go on with
        what arrived, exact ones fail. Datagrams of the old process are rejected from now on.

        The new process knows no earlier exchange. It answers, so it does not count as silent, and an exchange with it
        in a group that it has not made waits for it: continue in a group with a new name, or without it.

        Args:
            peer: Rank whose process was restarted.
            card: Card from `stormtorch.joining.rendezvous.newer_card`.

        Raises:
            ValueError: The process is not newer than the one that this rank knows.
        """
        self.check_owner(f"readmitting rank {peer}")
        with self._lock:
            try:
                keys = [self.keys_of(peer, card, lane) for lane in range(self.lanes)]
                self.endpoint.readmit(
                    peer, self.ports_of(card), card.incarnation, [key for key in keys if key], card.more_paths()
                )
            except RuntimeError as error:
                raise Closed(f"rank {self.rank}: readmitting rank {peer}: {error}") from error
            self.cards[peer] = card
            if self._shared_memory is not None:
                self._shared_memory.request_peer(peer, card)

    @property
    def lanes(self) -> int:
        """Number of sockets of this rank: those that share large messages, and the low-priority one."""
        return self.endpoint.lanes

    def ports_of(self, card: Card) -> list[tuple[str, int]]:
        """Addresses of a process by lane, for as many lanes as this rank has."""
        own = self.cards[self.rank].host
        ports = card.ports(self.lanes - self.endpoint.low, low=self.endpoint.low)
        return [(from_here(host, own), port) for host, port in ports]

    def fits(self, card: Card) -> bool:
        """Whether a process has all the lanes of this job."""
        return len(self.ports_of(card)) == self.lanes

    def lane_bytes_sent(self) -> list[int]:
        """Bytes that each lane has sent, by datagram or through shared memory."""
        self.check_owner("lane_bytes_sent")
        return self.endpoint.lane_bytes_sent()

    def share_memory(self) -> None:
        """Starts the setup of shared-memory channels to ranks of this machine; until then data travels by datagram."""
        try:
            self._shared_memory = SharedMemorySetup(self)
        except (OSError, RuntimeError) as error:
            _log.warning(
                "rank %d: cannot share memory with ranks of this machine, so data travels by datagram: %s",
                self.rank,
                error,
            )

    def near(self) -> list[int]:
        """Ranks with which this one exchanges data through shared memory."""
        self.check_owner("near")
        return self.endpoint.near()

    def replace_endpoint(self, other: "UdpTransport") -> None:
        """Takes over the endpoint of another transport of the same rank, made by `rendezvous.rejoin`.

        All users of this transport then use the new endpoint. Close this transport first: otherwise two endpoints
        answer for one rank. Channels keep their sequence numbers, so peers must have readmitted this rank and be at
        the same numbers.
        """
        self.endpoint, self.closed = other.endpoint, False
        self.cards, self.keys_of = other.cards, other.keys_of
        self._plans, self._orphans = other._plans, []
        install_views(self)
        if other.address_book is not None:
            other.address_book.stop()
            self.address_book = AddressBook(self)
            self.address_book.watch()
        self._shared_memory, other._shared_memory = other._shared_memory, None
        if self._shared_memory is not None:
            self._shared_memory.set_transport(self)
        if other._listener is not None and other._reception is not None:
            other._reception.set_transport(self)
            self.serve_requests(other._listener, other._reception)
            other._listener = None

    enter: Callable[[], None] = staticmethod(lambda: None)
    """Joins the running job's view: a late joiner calls it once it is ready to train."""

    def install(self, view: _engine.View) -> None:
        """Readmits the members of a view that this rank does not know yet. Calling it again changes nothing."""
        with self._lock:
            for rank, incarnation in (*view.members, *view.leaving):
                if rank == self.rank or incarnation <= self.incarnation(rank):
                    continue
                try:
                    card = unpack(self.card(rank, incarnation) or b"")
                except ValueError as error:
                    _log.warning(
                        "rank %d: view %d has no usable card of rank %d: %s", self.rank, view.number, rank, error
                    )
                    continue
                if card.incarnation == incarnation and self.fits(card):
                    self.readmit(rank, card)

    def serve_requests(self, listener: RpcServer, reception: RequestHandler) -> None:
        """Answers the requests at an admission port until this transport is closed."""
        self._listener, self._reception = listener, reception
        listener.answer, listener.status = reception.answer, reception.status

    def health(self) -> dict[str, Any]:
        """Counters of what was sent, received, retransmitted (`repaired`) and rejected."""
        self.check_owner("health")
        return dict(self.endpoint.health())

    def link(self, peer: int) -> tuple[float, float, float]:
        """Round-trip time in seconds, loss of what the peer sent, and rate towards the peer in bytes per second."""
        self.check_owner("link")
        round_trip_s, loss, rate, _ = self.endpoint.links([peer])[0]
        return round_trip_s, loss, rate

    def paths(self, peer: int) -> list[Path]:
        """State of each path to a peer, in the order of the options' `interfaces`."""
        self.check_owner("paths")
        return [Path(*each) for each in self.endpoint.paths(peer)]

    def path_bytes(self, peer: int) -> int:
        """Path MTU to a peer: the largest datagram that gets through now. Larger chunks are fragmented into pieces."""
        self.check_owner("path_bytes")
        return self.endpoint.links([peer])[0][3]

    def links(self, peers: Sequence[int]) -> list[tuple[float, float, float, int]]:
        """Round-trip time, loss, rate and largest datagram of several peers at one moment: see `link`, `path_bytes`."""
        self.check_owner("links")
        return self.endpoint.links(list(peers))

    def take_bottleneck_peaks(self) -> tuple[float, float, float]:
        """Peak bytes per second at the bottleneck since the last call: out, in, and both together."""
        self.check_owner("take_bottleneck_peaks")
        return self.endpoint.take_bottleneck_peaks()

    def drain(self) -> None:
        """Waits, before `close`, until no other rank needs the shards that this one owns."""
        if self.closed or self.inherited:
            return
        if self.leaving:
            for hand_over in list(self.on_leave):
                hand_over()
            return
        self.collective_servers.drain()

    def close(self, linger_s: float | None = None) -> None:
        """Sends a goodbye, waits until the peers have acknowledged it, and frees thread and socket.

        In a process that was forked from the one that joined the job, it sends nothing: the rank still runs.

        Args:
            linger_s: Longest time to wait; None takes the options' value, 0 sends one goodbye and does not wait.
        """
        if self.inherited:
            self.closed = True
            return
        if not self.closed:
            self._notify_close()
        if self.address_book is not None:
            self.address_book.stop()
        if self._listener is not None:
            self._listener.close()
        if self._shared_memory is not None:
            self._shared_memory.close()
        try:
            self.endpoint.close(self._linger_s if linger_s is None else linger_s)
        finally:
            self.closed = True
        self._plans.clear()

    def _notify_close(self) -> None:
        # A program may close its transport in a `finally` while an exception ends it.
        error = sys.exc_info()[1]
        failed = error is not None and not isinstance(error, SystemExit)
        why = self.why or ("left" if self.leaving else f"{type(error).__name__}: {error}" if failed else "done")
        for report in self.on_close:
            with contextlib.suppress(Exception):  # nothing may keep a transport from being closed
                report(why)

    def __enter__(self) -> "UdpTransport":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if kind is None:
            self.drain()
        elif not issubclass(kind, SystemExit):
            self.why = f"{kind.__name__}: {error}"
        self.close()

"""The transport over a real network: one UDP socket and one native engine per rank."""

import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.distributed_c10d import Store

from stormtorch import _engine
from stormtorch.errors import Closed, ExchangeTimeout, PeerFailed, PeerLeft
from stormtorch.transport.cards import Card
from stormtorch.transport.channels import Channels
from stormtorch.transport.exchange import Arrival, Plan, conclude
from stormtorch.transport.leaving import why_left
from stormtorch.transport.options import Options
from stormtorch.transport.waiting import FIRST_SLICE_S, SLICE_S, Patience, Servers, attends


class UdpExchange:
    """An exchange over UDP."""

    __slots__ = ("_endpoint", "_id", "_outcome", "_transport", "plan")

    def __init__(self, transport: "UdpTransport", plan: Plan, exchange_id: int) -> None:
        self._transport = transport
        self._endpoint = transport.endpoint
        self.plan = plan
        self._id = exchange_id
        self._outcome: _engine.Outcome | None = None

    def wait(self, timeout_s: float | None = None) -> Arrival:
        """Blocks until the exchange has ended; the tensors are then the caller's again."""
        transport = self._transport
        if self._outcome is None and self._past:
            raise Closed(f"rank {transport.rank}: {self.plan.what}: it ended when the rank was cut off and came back")
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
        """Whether it has ended, if only with its transport."""
        transport = self._transport
        over = self._outcome is not None or transport.closed or transport.inherited or self._past
        return over or transport.endpoint.ended(self._id)

    def __del__(self) -> None:
        if self._outcome is None and not self._past:
            self._transport.orphan(self._id)

    def cancel(self) -> None:
        """Gives it up; wait() then raises `Closed`."""
        if not self._past and not self._transport.inherited:
            self._endpoint.cancel(self._id)

    @property
    def _past(self) -> bool:
        """Whether the transport goes on with another endpoint, for which the same number is another exchange."""
        return self._endpoint is not self._transport.endpoint


class UdpTransport:
    """A rank's endpoint on a real network. Made by `stormtorch.connect`."""

    def __init__(
        self,
        endpoint: _engine.Endpoint,
        *,
        rank: int,
        world: int,
        chunk_bytes: int,
        trip_bytes: int,
        silence_s: float,
        timeout_s: float,
        linger_s: float,
        options: Options,
        store: Store,
        prefix: str,
        incarnations: Sequence[int],
        key_of: Callable[[int, Card], bytes],
    ) -> None:
        self.endpoint = endpoint
        self.rank = rank
        self.world = world
        self.chunk_bytes = chunk_bytes
        self.trip_bytes = trip_bytes
        self.silence_s = silence_s
        self.timeout_s = timeout_s
        self.channels = Channels()
        self.servers = Servers()
        self.closed = False
        # Peers that return are found there. The store is still its maker's.
        self.store = store
        self.prefix = prefix
        self.options = options
        self._incarnations = list(incarnations)
        self._key_of = key_of
        self._linger_s = linger_s
        # A process that is forked from this one has a copy of all this, but neither threads nor a place in the job.
        self._owner = os.getpid()
        # The engine reads and writes a plan's tensors until its exchange ends, whatever becomes of the caller's handle.
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
                "rank, and has no part in the job. Call it there; a process that is to be a rank of its own must be "
                "spawned, or forked before the group is made."
            )

    def post(self, plan: Plan) -> UdpExchange:
        """Begins an exchange. Returns at once; the plan's memory is the engine's until it ends."""
        self.check_owner(plan.what)
        if plan.timeout_s is None:
            plan.timeout_s = self.timeout_s
        try:
            exchange_id = self.endpoint.post(*plan.arguments())
        except RuntimeError as error:
            raise Closed(f"rank {self.rank}: {plan.what}: {error}") from error
        self._plans[exchange_id] = plan
        if self._orphans:
            self._sweep()
        return UdpExchange(self, plan, exchange_id)

    def wait(self, exchange_id: int, plan: Plan, timeout_s: float | None) -> _engine.Outcome:
        """Blocks until an exchange has ended, once."""
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

        if not attends():
            return wait(timeout_s)
        give_up_at = math.inf if timeout_s is None else time.monotonic() + timeout_s
        outcome = wait(max(min(FIRST_SLICE_S, give_up_at - time.monotonic()), 0.0))
        if outcome is not None or time.monotonic() >= give_up_at:
            return outcome
        patience = Patience(self, {each.peer for each in plan.sends} | {each.peer for each in plan.receives})
        try:
            while outcome is None and time.monotonic() < give_up_at:
                patience.look()
                outcome = wait(max(min(SLICE_S, give_up_at - time.monotonic()), 0.0))
        finally:
            patience.end()
        return outcome

    def peek(self, channel: int, seq: int) -> list[tuple[int, bytes]]:
        """Which ranks have begun an exchange that was not posted here, and the first chunk of what each sends."""
        self.check_owner("peek")
        return self.endpoint.peek(channel, seq)

    def orphan(self, exchange_id: int) -> None:
        """Nobody will wait for this exchange; its tensors are let go some time after it has ended."""
        self._orphans.append(exchange_id)

    def _sweep(self) -> None:
        orphans, self._orphans = self._orphans, []
        for exchange_id in orphans:
            if not self.endpoint.ended(exchange_id):
                self._orphans.append(exchange_id)
            elif self._plans.pop(exchange_id, None) is not None:
                self.endpoint.wait(exchange_id, 0.0)

    def incarnation(self, peer: int) -> int:
        """How many processes of a rank went before the one that is known here: 0 is the first."""
        return self._incarnations[peer]

    def readmit(self, peer: int, card: Card) -> None:
        """Goes on with the process that has taken a peer's place.

        The link to it begins anew. Its part in exchanges under way is over, as if it had fallen silent: lossy ones go
        on with what arrived, exact ones fail. Nothing of the old process is believed from now on.

        The new process knows no exchange from before. It answers, so it is not silent, and whatever is begun with it on
        a group that it has not begun too waits for it: go on in a group of a new name, or without it.

        Args:
            peer: The rank that has returned.
            card: What `stormtorch.transport.rendezvous.returned` gave.

        Raises:
            ValueError: The process is not newer than the one that is known here.
        """
        self.check_owner(f"readmitting rank {peer}")
        try:
            self.endpoint.readmit(peer, card.host, card.port, card.incarnation, self._key_of(peer, card))
        except RuntimeError as error:
            raise Closed(f"rank {self.rank}: readmitting rank {peer}: {error}") from error
        self._incarnations[peer] = card.incarnation

    def succeed(self, other: "UdpTransport") -> None:
        """Goes on with the endpoint of another transport of the same rank, made by `rendezvous.rejoin`.

        Whoever holds this one holds the new one from now on. Close this one first: two endpoints would answer for one
        rank. Exchanges go on where their channels were, but peers must have readmitted us, and know the same numbers.
        """
        self.endpoint, self.closed = other.endpoint, False
        self._incarnations, self._key_of = other._incarnations, other._key_of
        self._plans, self._orphans = other._plans, []

    def health(self) -> dict[str, Any]:
        """Counters of all that was sent, received, repaired and turned away."""
        self.check_owner("health")
        return dict(self.endpoint.health())

    def link(self, peer: int) -> tuple[float, float, float]:
        """Round trip in seconds, loss of what the peer sent, and rate towards it in bytes per second."""
        self.check_owner("link")
        return self.endpoint.link(peer)

    def path_bytes(self, peer: int) -> int:
        """The largest datagram that the path to a peer carries now; chunks that do not fit travel in pieces."""
        self.check_owner("path_bytes")
        return self.endpoint.path_bytes(peer)

    def part(self) -> None:
        """Waits, before `close`, until no other rank needs what this one owns of a prepared model."""
        if not self.closed and not self.inherited:
            self.servers.part()

    def close(self, linger_s: float | None = None) -> None:
        """Says goodbye to the peers, waits a moment until they have heard it, and frees thread and socket.

        In a process that was forked from the one that joined the job it says nothing: the rank is still there.

        Args:
            linger_s: How long to wait for that; None is what the options say, 0 says it once and goes.
        """
        if self.inherited:
            self.closed = True
            return
        try:
            self.endpoint.close(self._linger_s if linger_s is None else linger_s)
        finally:
            self.closed = True
        self._plans.clear()

    def __enter__(self) -> "UdpTransport":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.part()
        self.close()

"""Simulated network under virtual time: any number of ranks in one process, with loss, delay and queues.

The packets are those of the real engine; only the network is simulated. Ranks run as threads. Time stands still while
any of them computes and advances when all wait, so a run depends on its seed alone.

    network = SimulatedNetwork(world=16, loss=GilbertElliott(p=0.1, burst=8), delay_s=0.02, seed=1)
    results = network.run(train)        # train(transport) on each rank
"""

import itertools
import math
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import stormtorch._engine as _engine
from stormtorch.errors import Closed, ExchangeTimeout, StormError
from stormtorch.exchange.channels import Channels
from stormtorch.exchange.exchange import ExchangeResult, Plan, conclude
from stormtorch.exchange.options import Options
from stormtorch.exchange.reliability import Priority
from stormtorch.exchange.waiting import (
    FIRST_SLICE_S,
    INTERRUPT_SLICE_S,
    SLICE_S,
    CollectiveServer,
    CollectiveServers,
    Interruption,
    serves_collectives,
)
from stormtorch.network.faults import LinkOptions, faults
from stormtorch.network.loss import LossModel
from stormtorch.network.units import parse_rate

T = TypeVar("T")


class SimulatedExchange:
    """An exchange on a simulated network."""

    __slots__ = (
        "_arrival",
        "_network",
        "ask_at",
        "id",
        "interruption",
        "look_at",
        "outcome",
        "plan",
        "rank",
        "server",
        "serves_collectives",
    )

    def __init__(self, network: "SimulatedNetwork", rank: int, plan: Plan) -> None:
        self._network = network
        self.rank = rank
        self.plan = plan
        self.id: int | None = None
        self._arrival: ExchangeResult | None = None
        self.outcome: _engine.Outcome | None = None
        self.serves_collectives = False
        self.look_at = 0.0
        self.ask_at = 0.0
        self.interruption = Interruption()
        self.server: CollectiveServer | None = None
        """Collective server that the waiting rank must call before it continues to wait."""

    def wait(self, timeout_s: float | None = None) -> ExchangeResult:
        """Lets virtual time pass until the exchange has ended."""
        if self._arrival is None:
            self._network.wait_for(self, timeout_s)
            if self.outcome is None:
                raise ExchangeTimeout(f"rank {self.rank}: {self.plan.what} is not done after {timeout_s} virtual s")
            self._arrival = conclude(
                self.outcome, self.plan, self.rank, self._network.options.silence_s, self.plan.timeout_s
            )
            self.plan.keep = ()
        return self._arrival

    def done(self) -> bool:
        """Whether the exchange has ended."""
        return self.outcome is not None

    def cancel(self) -> None:
        """Cancels the exchange; wait() then raises `Closed`."""

        def cancel(sim: _engine.Sim) -> None:
            if self.outcome is None and self.id is not None:
                sim.cancel(self.rank, self.id)

        self._network.later(self.rank, cancel)


class _OtherWait:
    """A wait of a rank for a future or a view, not for an exchange."""

    __slots__ = ("look_at", "outcome", "rank", "server", "serves_collectives")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.outcome: bool | None = None
        self.serves_collectives = False
        self.look_at = 0.0
        self.server: CollectiveServer | None = None


class _ViewWait(_OtherWait):
    """A wait of a rank for a view with a number above another."""

    __slots__ = ("above",)

    def __init__(self, rank: int, above: int) -> None:
        super().__init__(rank)
        self.above = above


class _Thread(threading.local):
    """Number of a rank's thread: 0 is its own, others run background tasks."""

    number = 0


_thread = _Thread()


class SimulatedTransport:
    """A rank's endpoint on a simulated network. Made by `SimulatedNetwork`."""

    def __init__(self, network: "SimulatedNetwork", rank: int) -> None:
        self.network = network
        self.rank = rank
        self.world = network.world
        self.chunk_bytes = network.chunk_bytes
        self.trip_bytes = 16 << 10
        self.job = "simulated"
        self.channels = Channels()
        self.collective_servers = CollectiveServers()

    def post(self, plan: Plan) -> SimulatedExchange:
        """Begins an exchange at the current virtual time."""
        if plan.timeout_s is None:
            plan.timeout_s = self.network.options.timeout_s
        exchange = SimulatedExchange(self.network, self.rank, plan)
        self.network.post(self.rank, plan, exchange)
        return exchange

    def low_lane(self, _priority: Priority | None) -> bool:
        """Always false: all traffic of a simulated job has the priority of the network's options."""
        return False

    def in_background(self, task: Callable[[], None]) -> Callable[[], None]:
        """Wraps a task so that another thread may call it once and wait for exchanges while the rank goes on."""
        return self.network.in_background(task)

    def wait_future(self, future: Future[Any], _peers: Collection[int] = ()) -> None:
        """Lets virtual time pass until a future is done; the rank serves collectives meanwhile."""
        self.network.wait_future(self.rank, future)

    def peek(self, channel: int, seq: int) -> list[tuple[int, bytes]]:
        """Ranks that have begun an exchange that this rank has not posted, and the first chunk of each."""
        return self.network.peek(self.rank, channel, seq)

    def machine_of(self, rank: int) -> str:
        """Identity of a rank's machine, from the network's `machines`."""
        return self.network.machines[rank]

    def health(self) -> dict[str, Any]:
        """Counters of what was sent, received, retransmitted (`repaired`) and rejected."""
        return self.network.health(self.rank)

    @property
    def silence_s(self) -> float:
        """Time after which a silent peer counts as lost."""
        return self.network.options.silence_s

    def incarnation(self, _peer: int) -> int:
        """Number of a rank's process: always 0, because simulated ranks are never restarted."""
        return 0

    def enter(self) -> None:
        """Does nothing: all ranks of a simulated network are members from the start."""

    def install(self, view: _engine.View) -> None:
        """Does nothing: all ranks of a simulated network know each other from the start."""

    def watch(self) -> None:
        """Starts sending heartbeats to all peers. Without it, a rank only answers those of others."""
        self.network.later(self.rank, lambda sim: sim.watch(self.rank))

    def view(self) -> _engine.View | None:
        """Latest view that is usable here; None until this process knows one."""
        return self.network.query(lambda sim: sim.view(self.rank))

    def inside(self) -> bool:
        """Whether this process is a member of the latest view, or leaving in it."""
        return self.network.query(lambda sim: sim.inside(self.rank))

    def frozen(self) -> bool:
        """Whether a vote on the next view is under way, so that no step may complete."""
        return self.network.query(lambda sim: sim.frozen(self.rank))

    def wait_view(self, above: int, timeout_s: float | None = None) -> bool:
        """Lets virtual time pass until a usable view has a number above `above`; False if `timeout_s` has passed."""
        return self.network.wait_view(self.rank, above, timeout_s)

    def add_session(self, session: int, steps: int, settled: int) -> None:
        """Adds a session of this process with its number of steps."""
        self.network.query(lambda sim: sim.add_session(self.rank, session, steps, settled))

    def remove_session(self, session: int) -> None:
        """Removes a session."""
        self.network.query(lambda sim: sim.remove_session(self.rank, session))

    def advance(self, session: int, steps: int, settled: int, view: int) -> bool:
        """Advances a session. False, with nothing changed, if this process is frozen or `view` is not the latest."""
        return self.network.query(lambda sim: sim.advance_to(self.rank, session, steps, settled, view))

    def blank(self, session: int) -> bool:
        """Whether this process joined late and its session has not received the job's state yet."""
        return self.network.query(lambda sim: sim.blank(self.rank, session))

    def request_admission(self, peer: int, incarnation: int, card: bytes) -> None:
        """Sends the members a join request for a process; `card` holds its addresses and settings."""
        self.network.later(self.rank, lambda sim: sim.request_admission(self.rank, peer, incarnation, card))

    def request_leave(self) -> None:
        """Requests a view without this process."""
        self.network.later(self.rank, lambda sim: sim.request_leave(self.rank))

    def request_view(self) -> None:
        """Requests another view, even with the same members."""
        self.network.later(self.rank, lambda sim: sim.request_view(self.rank))

    def take_bottleneck_peaks(self) -> tuple[float, float, float]:
        """Peak bytes per second at the bottleneck since the last call: out, in, and both together."""
        return self.network.query(lambda sim: sim.take_bottleneck_peaks(self.rank))

    def card(self, peer: int, incarnation: int | None = None) -> bytes | None:
        """Card of a process, by default of the one that has the rank in the latest view; None if it is unknown."""
        return self.network.query(lambda sim: sim.card(self.rank, peer, incarnation))

    def join_requests(self) -> list[tuple[int, int]]:
        """Rank and incarnation of the processes with a pending join request and a known card."""
        return self.network.query(lambda sim: sim.join_requests(self.rank))

    def connectivity(self) -> dict[str, Any]:
        """Seconds since each rank's last message, the ranks that each can reach, and whether this rank has a quorum."""
        return dict(self.network.query(lambda sim: sim.connectivity(self.rank)))

    def close(self) -> None:
        """Does nothing: the network ends when nothing refers to it any more."""


def _links_inside(machines: Sequence[str]) -> dict[tuple[int, int], LinkOptions]:
    """Faults between ranks of one machine: none."""
    none = LinkOptions(loss=0.0, burst=1.0, duplicate=0.0, reorder=0.0, corrupt=0.0)
    pairs = itertools.permutations(range(len(machines)), 2)
    return {(source, target): none for source, target in pairs if machines[source] == machines[target]}


def core_settings(world: int, options: Options, *, unlimited: bool, seed: int) -> dict[str, Any]:
    """Settings of the engine's cores in a simulation.

    Args:
        world: Number of ranks.
        options: Options of the transports; those about sockets have no effect.
        unlimited: Whether the links have no rate limit: like loopback, they then have no bottleneck to find.
        seed: Seed that distinguishes jobs.
    """
    mode, bytes_per_s = options.rate_mode(loopback=unlimited)
    key = options.key
    return {
        "datagram_bytes": options.datagram_bytes or 1472,
        "receive_buffer": options.receive_buffer_bytes,
        "pool_bytes": options.pool_bytes,
        "eager_bytes": options.eager_bytes,
        "rate_mode": int(mode),
        "bytes_per_s": bytes_per_s,
        "yield_delay_s": options.yield_delay_s,
        "silence_s": options.silence_s,
        "cookie": seed,
        "incarnations": [],
        "checks_data": True,
        "keys": [] if key is None else [[2 * (key[:14] + rank.to_bytes(2, "little")) for rank in range(world)]],
    }


class SimulatedNetwork:
    """Ranks connected by one simulated switch.

    Args:
        world: Number of ranks.
        loss: Probability that a datagram is lost, or a loss model of `stormtorch.network.loss`.
        delay_s: One-way delay.
        rate: Rate of each rank's link, such as "400mbit"; None is unlimited.
        queue_bytes: Queue of the switch towards each rank; datagrams that do not fit are dropped.
        seed: Random seed of the loss; the same seed drops the same packets.
        options: Options of the transports; those about sockets have no effect.
        machines: Name of each rank's machine; None gives every rank its own. Between ranks of one machine, nothing is
            lost. Each rank still has its own link, with the same delay and rate.
        knobs: Further arguments of `stormtorch.faults`, such as `duplicate`, `reorder` and `corrupt`.
    """

    def __init__(
        self,
        world: int,
        *,
        loss: float | LossModel = 0.0,
        delay_s: float = 50e-6,
        rate: str | float | None = None,
        queue_bytes: int = 512 << 10,
        seed: int = 0,
        options: Options | None = None,
        machines: Sequence[str] | None = None,
        **knobs: Any,
    ) -> None:
        if not 1 <= world <= 65535:
            raise ValueError(f"world must lie in [1, 65535], got {world}")
        if not delay_s >= 0.0:
            raise ValueError(f"delay_s must not be negative, got {delay_s}")
        self.machines = tuple(f"host {rank}" for rank in range(world)) if machines is None else tuple(machines)
        if len(self.machines) != world:
            raise ValueError(f"machines must name one machine per rank, {world}, got {len(self.machines)}")
        if machines is not None:
            knobs["links"] = {**knobs.get("links", {}), **_links_inside(self.machines)}
        self.world = world
        self.options = options or Options(datagram_bytes=1472)
        core = core_settings(world, self.options, unlimited=rate is None, seed=seed)
        self.chunk_bytes = _engine.chunk_bytes(core["datagram_bytes"], self.options.key is not None)
        self._sim = _engine.Sim(
            world,
            core,
            dict(faults(loss=loss, seed=seed, **knobs).settings),
            delay_s,
            0.0 if rate is None else parse_rate(rate) / 8.0,
            queue_bytes,
        )
        self._transports = [SimulatedTransport(self, rank) for rank in range(world)]
        self._condition = threading.Condition()
        self._posts: list[tuple[tuple[int, int], Callable[[_engine.Sim], object]]] = []
        self._running: dict[tuple[int, int], SimulatedExchange] = {}
        self._waiting: dict[SimulatedExchange | _OtherWait, float] = {}  # with the virtual time at which each times out
        self._interruptible: set[SimulatedExchange] = set()  # waiting exchanges that may be interrupted
        self._awake = 0
        self._ranks = 0  # ranks whose own threads have not ended
        self._asides = itertools.count(1)
        self._aside = 0  # background tasks that have not ended
        self._broken: BaseException | None = None

    @property
    def now_s(self) -> float:
        """Virtual time, in seconds."""
        return self._sim.now_s

    @property
    def queue_drops(self) -> int:
        """Number of datagrams that the switch's queues dropped: congestion loss."""
        return self._sim.queue_drops

    def set_unreachable(self, rank: int, unreachable: bool) -> None:
        """Disconnects a rank from the network, or connects it again."""
        with self._condition:
            self._sim.set_unreachable(rank, unreachable)

    def set_link(self, source: int, target: int, unreachable: bool) -> None:
        """Cuts the link from one rank to another, or restores it. The opposite direction is another link."""
        with self._condition:
            self._sim.set_link(source, target, unreachable)

    def set_link_rate(self, rank: int, *, up: str | float | None = None, down: str | float | None = None) -> None:
        """Sets the rates of one rank's link, out and in, from now on; None restores the network's rate."""
        rates = [0.0 if rate is None else parse_rate(rate) / 8.0 for rate in (up, down)]
        with self._condition:
            self._sim.set_link_rate(rank, *rates)

    def query(self, question: Callable[[_engine.Sim], T]) -> T:
        """Calls `question(sim)`, which must not send anything: ranks that run at the same time could race."""
        with self._condition:
            return question(self._sim)

    def later(self, rank: int, work: Callable[[_engine.Sim], object]) -> None:
        """Calls `work(sim)` for a rank when all ranks wait, in the order of ranks, so that threads cannot race."""
        with self._condition:
            self._posts.append(((rank, _thread.number), work))

    def in_background(self, task: Callable[[], None]) -> Callable[[], None]:
        """Wraps a task for another thread of the calling rank. Time stands still while it computes, too."""
        with self._condition:
            self._awake += 1
            self._aside += 1
            number = next(self._asides)

        def body() -> None:
            _thread.number = number
            try:
                task()
            finally:
                _thread.number = 0
                with self._condition:
                    self._awake -= 1
                    self._aside -= 1
                    self._move_on()

        return body

    def wait_future(self, rank: int, future: Future[Any]) -> None:
        """Blocks the calling rank until a future is done; the rank serves collectives meanwhile."""
        wait = _OtherWait(rank)

        def settled(_future: Future[Any]) -> None:
            with self._condition:
                wait.outcome = True
                self._wake(wait)
                self._condition.notify_all()

        future.add_done_callback(settled)
        while (server := self._sleep(wait, math.inf)) is not None:
            server.serve()

    def health(self, rank: int) -> dict[str, Any]:
        """Counters of one rank."""
        with self._condition:
            return dict(self._sim.health(rank))

    def peek(self, rank: int, channel: int, seq: int) -> list[tuple[int, bytes]]:
        """Ranks that have begun an exchange that one rank has not posted, and the first chunk of each."""
        with self._condition:
            return self._sim.peek(rank, channel, seq)

    def run(self, work: Callable[[SimulatedTransport], T]) -> list[T]:
        """Calls `work(transport)` for every rank, each in a thread, and returns the results by rank.

        If ranks fail, the error of the lowest rank is raised after all have ended, with the others' errors as notes.
        """
        results: list[Any] = [None] * self.world
        errors: list[BaseException | None] = [None] * self.world
        self._awake = self._ranks = self.world
        self._broken = None

        def body(rank: int) -> None:
            try:
                results[rank] = work(self._transports[rank])
            except BaseException as error:
                errors[rank] = error
            finally:
                with self._condition:
                    self._awake -= 1
                    self._ranks -= 1
                    if self._ranks == 0 and self._aside:
                        # No rank is left for which a background task could wait.
                        self._broken = self._broken or Closed("the ranks of the simulated network have ended")
                    self._move_on()

        threads = [threading.Thread(target=body, args=(rank,), name=f"rank {rank}") for rank in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with self._condition:
            self._condition.wait_for(lambda: self._aside == 0)
        failed = [(rank, error) for rank, error in enumerate(errors) if error is not None]
        if failed:
            _, first = failed[0]
            for rank, error in failed[1:]:
                first.add_note(f"Rank {rank} failed, too: {error!r}")
            raise first
        return results

    def post(self, rank: int, plan: Plan, exchange: SimulatedExchange) -> None:
        """Queues an exchange. It begins when all ranks wait, in the order of ranks, so that threads cannot race."""

        def begin(sim: _engine.Sim) -> None:
            exchange.id = sim.post(rank, *plan.arguments())
            self._running[rank, exchange.id] = exchange

        self.later(rank, begin)

    def wait_for(self, exchange: SimulatedExchange, timeout_s: float | None) -> None:
        """Blocks the calling rank until the exchange has ended; the rank serves collectives meanwhile."""
        give_up_at = math.inf if timeout_s is None else self.now_s + timeout_s
        while (server := self._sleep(exchange, give_up_at)) is not None:
            server.serve()

    def wait_view(self, rank: int, above: int, timeout_s: float | None) -> bool:
        """Blocks the calling rank until it knows a view with a number above `above`, or the time has passed."""
        wait = _ViewWait(rank, above)
        give_up_at = math.inf if timeout_s is None else self.now_s + timeout_s
        if self.query(lambda sim: sim.view(rank)) is None or self._sim.view_number(rank) <= above:
            while (server := self._sleep(wait, give_up_at)) is not None:
                server.serve()
        return self._sim.view_number(rank) > above

    def _sleep(self, exchange: SimulatedExchange | _OtherWait, give_up_at: float) -> CollectiveServer | None:
        """Sleeps until the exchange has ended, or returns a collective server that must be called."""
        with self._condition:
            if exchange.outcome is not None:
                return None
            self._waiting[exchange] = give_up_at
            if isinstance(exchange, SimulatedExchange) and exchange.plan.interrupted is not None:
                exchange.ask_at = self.now_s + INTERRUPT_SLICE_S
                self._interruptible.add(exchange)
            exchange.serves_collectives, exchange.look_at = serves_collectives(), self.now_s + FIRST_SLICE_S
            self._awake -= 1
            self._move_on()
            self._condition.wait_for(lambda: exchange not in self._waiting or self._broken is not None)
            if self._broken is not None and exchange.outcome is None:
                self._waiting.pop(exchange, None)
                raise StormError("the simulated network has stopped after an error") from self._broken
            server, exchange.server = exchange.server, None
            return server

    def _move_on(self) -> None:
        """If all ranks sleep, begins the exchanges they posted and lets time pass until one of them can continue."""
        while self._awake == 0 and self._waiting and self._broken is None:
            try:
                self._begin()
                if self._awake > 0:
                    break
                if (
                    self._sim.advance() == 0
                    and not self._serve_collectives(at_once=True)
                    and not self._interrupt(at_once=True)
                ):
                    raise StormError(
                        "deadlock: all ranks wait, and no event is left: has every rank called the collective?"
                    )
                self._finish()
                self._serve_collectives()
                self._interrupt()
            except BaseException as error:
                self._broken = error
        self._condition.notify_all()

    def _begin(self) -> None:
        posts, self._posts = self._posts, []
        for _, begin in sorted(posts, key=lambda post: post[0]):
            begin(self._sim)
        self._finish()

    def _finish(self) -> None:
        for rank in range(self.world):
            for exchange_id, outcome in self._sim.take_finished(rank):
                exchange = self._running.pop((rank, exchange_id))
                exchange.outcome = outcome
                self._wake(exchange)
        for waiting, give_up_at in list(self._waiting.items()):
            if self.now_s >= give_up_at or (
                isinstance(waiting, _ViewWait) and self._sim.view_number(waiting.rank) > waiting.above
            ):
                self._wake(waiting)

    def _serve_collectives(self, *, at_once: bool = False) -> bool:
        """Wakes ranks that can take part in collectives that others have started."""
        found = False
        for exchange in sorted(self._waiting, key=lambda waiting: waiting.rank):
            if exchange.serves_collectives and (at_once or self.now_s >= exchange.look_at):
                exchange.look_at = self.now_s + SLICE_S
                exchange.server = self._transports[exchange.rank].collective_servers.requested()
                if exchange.server is not None:
                    found = True
                    self._wake(exchange)
        return found

    def _interrupt(self, *, at_once: bool = False) -> bool:
        """Cancels exchanges that a new view interrupts and that cannot complete."""
        found = False
        for exchange in sorted(self._interruptible, key=lambda waiting: waiting.rank):
            if exchange not in self._waiting or not (at_once or self.now_s >= exchange.ask_at):
                continue
            exchange.ask_at = self.now_s + INTERRUPT_SLICE_S
            if exchange.id is None or exchange.plan.interrupted is None or not exchange.plan.interrupted():
                continue
            can_complete = self._sim.can_complete(exchange.rank, exchange.id)
            if at_once or exchange.interruption.should_abort(can_complete, self.now_s):
                exchange.plan.stopped = found = True
                self._sim.cancel(exchange.rank, exchange.id)
        if found:
            self._finish()
        return found

    def _wake(self, exchange: SimulatedExchange | _OtherWait) -> None:
        if self._waiting.pop(exchange, None) is not None:
            self._awake += 1
            if isinstance(exchange, SimulatedExchange):
                self._interruptible.discard(exchange)

"""A network in memory under virtual time: any number of ranks in one process, with loss, delay and queues.

The packets are those of the real engine; only the wire is simulated. Ranks run as threads. Time stands still while any
of them computes and advances when all wait, so a run depends on its seed alone.

    network = SimulatedNetwork(world=16, loss=GilbertElliott(p=0.1, burst=8), delay_s=0.02, seed=1)
    results = network.run(train)        # train(transport) on each rank
"""

import math
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import stormtorch._engine as _engine
from stormtorch.errors import ExchangeTimeout, StormError
from stormtorch.network.faults import faults
from stormtorch.network.loss import LossModel
from stormtorch.network.units import parse_rate
from stormtorch.transport.channels import Channels
from stormtorch.transport.exchange import Arrival, Plan, conclude
from stormtorch.transport.options import Options
from stormtorch.transport.waiting import FIRST_SLICE_S, SLICE_S, Server, Servers, attends

T = TypeVar("T")


class SimulatedExchange:
    """An exchange on a simulated network."""

    __slots__ = ("_arrival", "_network", "_plan", "attends", "look_at", "outcome", "rank", "server")

    def __init__(self, network: "SimulatedNetwork", rank: int, plan: Plan) -> None:
        self._network = network
        self.rank = rank
        self._plan = plan
        self._arrival: Arrival | None = None
        self.outcome: _engine.Outcome | None = None
        self.attends = False
        self.look_at = 0.0
        self.server: Server | None = None
        """Server that the waiting rank must call before it continues to wait."""

    def wait(self, timeout_s: float | None = None) -> Arrival:
        """Lets virtual time pass until the exchange has ended."""
        if self._arrival is None:
            self._network.wait_for(self, timeout_s)
            if self.outcome is None:
                raise ExchangeTimeout(f"rank {self.rank}: {self._plan.what} is not done after {timeout_s} virtual s")
            self._arrival = conclude(
                self.outcome, self._plan, self.rank, self._network.options.silence_s, self._plan.timeout_s
            )
            self._plan.keep = ()
        return self._arrival

    def done(self) -> bool:
        """Whether the exchange has ended."""
        return self.outcome is not None


class SimulatedTransport:
    """A rank's endpoint on a simulated network. Made by `SimulatedNetwork`."""

    def __init__(self, network: "SimulatedNetwork", rank: int) -> None:
        self.network = network
        self.rank = rank
        self.world = network.world
        self.chunk_bytes = network.chunk_bytes
        self.trip_bytes = 16 << 10
        self.channels = Channels()
        self.servers = Servers()

    def post(self, plan: Plan) -> SimulatedExchange:
        """Begins an exchange at the current virtual time."""
        if plan.timeout_s is None:
            plan.timeout_s = self.network.options.timeout_s
        exchange = SimulatedExchange(self.network, self.rank, plan)
        self.network.post(self.rank, plan, exchange)
        return exchange

    def peek(self, channel: int, seq: int) -> list[tuple[int, bytes]]:
        """Ranks that have begun an exchange which this rank has not posted, and the first chunk that each sends."""
        return self.network.peek(self.rank, channel, seq)

    def health(self) -> dict[str, Any]:
        """Counters of what was sent, received, repaired and rejected."""
        return self.network.health(self.rank)

    def close(self) -> None:
        """Does nothing: the network ends when nothing refers to it any more."""


class SimulatedNetwork:
    """Ranks joined by one simulated switch.

    Args:
        world: Number of ranks.
        loss: Probability that a datagram is lost, or a loss model of `stormtorch.network.loss`.
        delay_s: One-way delay.
        rate: Rate of each rank's link, such as "400mbit"; None is unlimited.
        queue_bytes: Queue of the switch towards each rank; datagrams that do not fit are dropped.
        seed: Seed of the loss.
        options: Options of the transports; those about sockets have no effect.
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
        **knobs: Any,
    ) -> None:
        if not 1 <= world <= 65535:
            raise ValueError(f"world must lie in [1, 65535], got {world}")
        if not delay_s >= 0.0:
            raise ValueError(f"delay_s must not be negative, got {delay_s}")
        self.world = world
        self.options = options or Options(datagram_bytes=1472)
        datagram_bytes = self.options.datagram_bytes or 1472
        # Like loopback, an unlimited link has no bottleneck to find.
        mode, bytes_per_s = self.options.rate_mode(loopback=rate is None)
        key = self.options.key
        self.chunk_bytes = _engine.chunk_bytes(datagram_bytes, key is not None)
        self._sim = _engine.Sim(
            world,
            {
                "datagram_bytes": datagram_bytes,
                "receive_buffer": self.options.receive_buffer_bytes,
                "pool_bytes": self.options.pool_bytes,
                "eager_bytes": self.options.eager_bytes,
                "rate_mode": int(mode),
                "bytes_per_s": bytes_per_s,
                "silence_s": self.options.silence_s,
                "cookie": seed,
                "incarnations": [],
                "checks_data": True,
                "keys": [] if key is None else [key[:14] + rank.to_bytes(2, "little") for rank in range(world)],
            },
            dict(faults(loss=loss, seed=seed, **knobs).settings),
            delay_s,
            0.0 if rate is None else parse_rate(rate) / 8.0,
            queue_bytes,
        )
        self._transports = [SimulatedTransport(self, rank) for rank in range(world)]
        self._condition = threading.Condition()
        self._posts: list[tuple[int, Plan, SimulatedExchange]] = []
        self._running: dict[tuple[int, int], SimulatedExchange] = {}
        self._waiting: dict[SimulatedExchange, float] = {}  # with the virtual time at which each gives up
        self._awake = 0
        self._broken: BaseException | None = None

    @property
    def now_s(self) -> float:
        """Virtual time, in seconds."""
        return self._sim.now_s

    @property
    def queue_drops(self) -> int:
        """Number of datagrams that the switch's queues dropped: loss that the senders caused by themselves."""
        return self._sim.queue_drops

    def set_dark(self, rank: int, dark: bool) -> None:
        """Cuts a rank off, or connects it again."""
        with self._condition:
            self._sim.set_dark(rank, dark)

    def health(self, rank: int) -> dict[str, Any]:
        """Counters of one rank."""
        with self._condition:
            return dict(self._sim.health(rank))

    def peek(self, rank: int, channel: int, seq: int) -> list[tuple[int, bytes]]:
        """Ranks that have begun an exchange which one rank has not posted, and the first chunk that each sends."""
        with self._condition:
            return self._sim.peek(rank, channel, seq)

    def run(self, work: Callable[[SimulatedTransport], T]) -> list[T]:
        """Calls `work(transport)` for every rank, each in a thread, and returns the results by rank.

        If ranks fail, the error of the lowest rank is raised after all have ended.
        """
        results: list[Any] = [None] * self.world
        errors: list[BaseException | None] = [None] * self.world
        self._awake, self._broken = self.world, None

        def body(rank: int) -> None:
            try:
                results[rank] = work(self._transports[rank])
            except BaseException as error:
                errors[rank] = error
            finally:
                with self._condition:
                    self._awake -= 1
                    self._move_on()

        threads = [threading.Thread(target=body, args=(rank,), name=f"rank {rank}") for rank in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in errors:
            if error is not None:
                raise error
        return results

    def post(self, rank: int, plan: Plan, exchange: SimulatedExchange) -> None:
        """Notes an exchange. It begins when all ranks wait, in the order of ranks, so that threads cannot race."""
        with self._condition:
            self._posts.append((rank, plan, exchange))

    def wait_for(self, exchange: SimulatedExchange, timeout_s: float | None) -> None:
        """Blocks the calling rank until the exchange has ended; meanwhile, the rank serves others."""
        give_up_at = math.inf if timeout_s is None else self.now_s + timeout_s
        while (server := self._sleep(exchange, give_up_at)) is not None:
            server.serve()

    def _sleep(self, exchange: SimulatedExchange, give_up_at: float) -> Server | None:
        """Sleeps until the exchange has ended, or returns a server that must be called."""
        with self._condition:
            if exchange.outcome is not None:
                return None
            self._waiting[exchange] = give_up_at
            exchange.attends, exchange.look_at = attends(), self.now_s + FIRST_SLICE_S
            self._awake -= 1
            self._move_on()
            self._condition.wait_for(lambda: exchange not in self._waiting or self._broken is not None)
            if self._broken is not None and exchange.outcome is None:
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
                if self._sim.advance() == 0 and not self._attend(at_once=True):
                    raise StormError(
                        "ranks wait, but nothing can happen any more: has every rank called the collective?"
                    )
                self._finish()
                self._attend()
            except BaseException as error:
                self._broken = error
        self._condition.notify_all()

    def _begin(self) -> None:
        for rank, plan, exchange in sorted(self._posts, key=lambda post: post[0]):
            exchange_id = self._sim.post(rank, *plan.arguments())
            self._running[rank, exchange_id] = exchange
        self._posts.clear()
        self._finish()

    def _finish(self) -> None:
        for rank in range(self.world):
            for exchange_id, outcome in self._sim.take_finished(rank):
                exchange = self._running.pop((rank, exchange_id))
                exchange.outcome = outcome
                self._wake(exchange)
        for exchange, give_up_at in list(self._waiting.items()):
            if self.now_s >= give_up_at:
                self._wake(exchange)

    def _attend(self, *, at_once: bool = False) -> bool:
        """Wakes ranks that can take part in calls that others have begun."""
        found = False
        for exchange in sorted(self._waiting, key=lambda waiting: waiting.rank):
            if exchange.attends and (at_once or self.now_s >= exchange.look_at):
                exchange.look_at = self.now_s + SLICE_S
                exchange.server = self._transports[exchange.rank].servers.awaited()
                if exchange.server is not None:
                    found = True
                    self._wake(exchange)
        return found

    def _wake(self, exchange: SimulatedExchange) -> None:
        if self._waiting.pop(exchange, None) is not None:
            self._awake += 1

"""Groups of ranks (communicators) that call the same collectives in the same order, and their started collectives."""

import copy
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from stormtorch.errors import Closed
from stormtorch.exchange.exchange import Exchange, ExchangeResult, Plan, Transport
from stormtorch.exchange.reliability import Priority

T = TypeVar("T")

Steps = Generator[Plan, ExchangeResult, None]
"""Collective as a generator: it yields the plan of an exchange and receives that exchange's result."""


def nothing() -> Steps:
    """Makes no exchange: the collective of a group of one rank."""
    yield from ()


class Pending:
    """Started collective. The caller must not touch its tensors until `wait` has returned.

    A collective of several exchanges starts the next one only within a call of `wait` or `done`.
    """

    def __init__(self, group: "Group", steps: Steps, exchanges: int = 1) -> None:
        self.exchanges = exchanges
        self._group = group
        self._steps = steps
        self._arrivals: list[ExchangeResult] = []
        self._exchange: Exchange | None = None
        self._error: Exception | None = None
        self._advance(None)

    def wait(self, timeout_s: float | None = None) -> list[ExchangeResult]:
        """Blocks until the collective has ended and returns the result of each of its exchanges."""
        if self._error is not None:
            raise self._error
        while self._exchange is not None:
            self._step(self._exchange, timeout_s)
        return self._arrivals

    def cancel(self) -> None:
        """Cancels the collective. Its tensors belong to the caller again; `wait` raises `Closed` from now on."""
        if self.ended or self._exchange is None:
            return
        self._exchange.cancel()
        try:
            self._exchange.wait()
        except Exception as error:
            self._error = error
        self._error = self._error or Closed("the collective was cancelled")

    def stop(self) -> None:
        """Cancels the collective while another thread waits for it: that thread's `wait` raises `Closed` soon."""
        exchange = self._exchange
        if exchange is not None:
            exchange.cancel()

    @property
    def ended(self) -> bool:
        """Whether the collective is already known to have ended, without polling the transport."""
        return self._exchange is None or self._error is not None

    def done(self) -> bool:
        """Whether the collective has ended, well or not; starts its next exchange when one has ended."""
        while not self.ended and self._exchange is not None and self._exchange.done():
            try:
                self._step(self._exchange, None)
            except Exception:
                return True  # `wait` will raise the error again
        return self.ended

    def _step(self, exchange: Exchange, timeout_s: float | None) -> None:
        try:
            arrival = exchange.wait(timeout_s)
            self._arrivals.append(arrival)
            self._advance(arrival)
        except Exception as error:
            # If the exchange still runs, only this wait timed out, not the collective.
            if self._exchange is not exchange or exchange.done():
                self._error = error
            raise

    def _advance(self, arrival: ExchangeResult | None) -> None:
        self._exchange = None
        try:
            plan = next(self._steps) if arrival is None else self._steps.send(arrival)
        except StopIteration:
            return
        self._exchange = self._group.post(plan)


class Group:
    """Ranks that call collectives together.

    Every member must create the group with the same name and ranks and call the same collectives in the same order.
    A collective returns a `Pending` at once; call its `wait`. Within a group, a rank is a position in `ranks`.

    Args:
        transport: Carries the exchanges.
        ranks: The members, as ranks of the transport; None takes all of them.
        name: Name of the group, which distinguishes groups of the same ranks.
        view: View for which the group is made, or 0: see `Plan.view`.
        interrupted: Function that is called during a wait for a collective: see `Plan.interrupted`.
        priority: Priority of the group's traffic: "normal" or "low"; None is the job's own. A job with
            `Options(priority="both")` may have groups of both.
    """

    def __init__(
        self,
        transport: Transport,
        ranks: Sequence[int] | None = None,
        *,
        name: str = "world",
        view: int = 0,
        interrupted: Callable[[], bool] | None = None,
        priority: Priority | None = None,
    ) -> None:
        self.transport = transport
        self.priority = priority
        self._low = transport.low_lane(priority)
        self.ranks = tuple(range(transport.world) if ranks is None else ranks)
        # Over UDP, processes may have joined beyond the ranks of the start.
        slots: int = getattr(transport, "capacity", transport.world)
        if len(set(self.ranks)) != len(self.ranks) or not all(0 <= rank < slots for rank in self.ranks):
            raise ValueError(f"ranks must be distinct ranks of a world of {slots}, got {self.ranks}")
        if transport.rank not in self.ranks:
            raise ValueError(f"rank {transport.rank} is not among the group's ranks {self.ranks}")
        self.name = name
        self.view = view
        self.interrupted = interrupted
        self.rank = self.ranks.index(transport.rank)
        self.size = len(self.ranks)
        self._channel: tuple[object, ...] = (name, *self.ranks)
        self._reserved: tuple[int, range] | None = None

    def reordered(self, order: Sequence[int]) -> "Group":
        """Returns a group of the same ranks in another order, on the same channel. The order decides the owners."""
        ranks = [self.ranks[position] for position in order]
        other = Group(
            self.transport,
            ranks,
            name=self.name,
            view=self.view,
            interrupted=self.interrupted,
            priority=self.priority,
        )
        other._channel = self._channel
        return other

    def on_channel(self, name: str) -> "Group":
        """Returns the same ranks on a channel named by `name` alone, which outlives changes of the members."""
        other = copy.copy(self)
        other._channel = (name,)
        return other

    def subgroup(self, positions: Sequence[int], name: str) -> "Group":
        """Returns a group of some of the ranks, in the same view."""
        ranks = [self.ranks[position] for position in positions]
        name = f"{self.name}/{name}"
        return Group(
            self.transport, ranks, name=name, view=self.view, interrupted=self.interrupted, priority=self.priority
        )

    def start(self, steps: Steps, exchanges: int = 1) -> Pending:
        """Starts a collective that makes the given number of exchanges, one after the other."""
        return Pending(self, steps, exchanges)

    def post(self, plan: Plan) -> Exchange:
        """Begins an exchange of this group, in its view."""
        plan.view, plan.interrupted, plan.low = self.view, self.interrupted, self._low
        return self.transport.post(plan)

    def reserve(self, count: int = 1) -> tuple[int, int]:
        """Reserves `count` sequence numbers; returns the group's channel and the first number."""
        if self._reserved is None:
            return self.transport.channels.take(self._channel, count)
        channel, left = self._reserved
        if count > len(left):
            raise RuntimeError(f"group {self.name}: {len(left)} sequence numbers were reserved, {count} are needed")
        self._reserved = channel, left[count:]
        return channel, left[0]

    def reserve_ahead(self, count: int) -> "Group":
        """Reserves `count` sequence numbers now, for collectives that begin later.

        Returns a group of the same ranks that uses them. Ranks may begin these collectives before or after others of
        this group, but must begin them in the same order.
        """
        channel, first = self.reserve(count)
        other = copy.copy(self)
        other._reserved = channel, range(first, first + count)
        return other

    @cached_property
    def node_layout(self) -> "NodeLayout | None":
        """Layout of the ranks over machines, if several machines have the same number of ranks, two or more.

        None for any other layout, and for a group with a view: its exchanges go on without lost ranks, and a hierarchy
        would lose a whole machine's contributions with one rank. A caller that repeats such an exchange in the next
        view uses `by_machine`.
        """
        return None if self.view or self.interrupted is not None else self.by_machine(self.transport.machine_of)

    def by_machine(self, machine_of: Callable[[int], str]) -> "NodeLayout | None":
        """Returns the layout of the ranks over machines, if several machines have equally many ranks, two or more.

        Args:
            machine_of: Returns the identity of the machine of a rank of the transport, the same on all ranks of the
                group; an empty text if it is unknown.
        """
        by_machine: dict[str, list[int]] = {}
        for position, rank in enumerate(self.ranks):
            by_machine.setdefault(machine_of(rank), []).append(position)
        each = len(next(iter(by_machine.values())))
        even = all(len(positions) == each for positions in by_machine.values())
        if "" in by_machine or not even or each == 1 or len(by_machine) == 1:
            return None
        return NodeLayout.of(self, tuple(tuple(positions) for positions in by_machine.values()))

    def posted_by_peers(self) -> list[tuple[int, bytes]]:
        """Lists ranks that have started the next exchange before this rank, each with the first chunk that it sent."""
        firsts = self.transport.peek(*self.transport.channels.peek(self._channel))
        return [(self.ranks.index(rank), payload) for rank, payload in firsts if rank in self.ranks]

    def reserve_point_to_point(self, source: int, target: int, tag: int) -> tuple[int, int]:
        """Reserves a sequence number for a message from one rank to another; returns its channel and the number."""
        return self.transport.channels.take((*self._channel, "pair", source, target, tag))

    def complete_only(self, placed: list[T], arrival: ExchangeResult) -> list[T]:
        """Returns the items, of one per rank, of the ranks whose messages arrived whole, and this rank's own.

        In a group without a view, these are all.
        """
        return [each for peer, each in enumerate(placed) if arrival.fraction(peer=self.ranks[peer]) == 1.0]

    def others(self) -> list[int]:
        """Lists the other ranks, starting after this one, so that not all ranks send to the same one first."""
        return [(self.rank + i) % self.size for i in range(1, self.size)]

    def check_rank(self, rank: int, what: str) -> None:
        """Raises ValueError unless `rank` is one of the group's."""
        if not 0 <= rank < self.size:
            raise ValueError(f"{what} must lie in [0, {self.size}), got {rank}")


@dataclass(frozen=True, kw_only=True)
class NodeLayout:
    """Ranks of a group by machine, the same number on each machine. Ranks are positions in the group."""

    machines: tuple[tuple[int, ...], ...]
    """Ranks of each machine, in the order of the group; machines in the order of their first ranks."""
    inside: Group
    """Ranks of this rank's machine."""
    between: Group
    """Ranks at the same position on their machines as this rank, one of each machine."""

    @classmethod
    def of(cls, group: Group, machines: tuple[tuple[int, ...], ...]) -> "NodeLayout":
        """Makes the groups of this rank."""
        mine = next(ranks for ranks in machines if group.rank in ranks)
        peers = [ranks[mine.index(group.rank)] for ranks in machines]
        return cls(
            machines=machines,
            inside=group.subgroup(mine, "inside"),
            between=group.subgroup(peers, "between"),
        )

    @property
    def each(self) -> int:
        """Number of ranks on each machine."""
        return self.inside.size

    def place(self, rank: int) -> tuple[int, int]:
        """Returns the machine of a rank, and its position there."""
        return next((at, ranks.index(rank)) for at, ranks in enumerate(self.machines) if rank in ranks)

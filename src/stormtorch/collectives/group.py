"""Some ranks of a transport that call the same collectives in the same order."""

from collections.abc import Generator, Sequence

from stormtorch.transport.exchange import Arrival, Exchange, Plan, Transport

Steps = Generator[Plan, Arrival, None]
"""A collective as it runs: it yields the plan of an exchange and is sent back what arrived."""


def nothing() -> Steps:
    """A collective without exchanges."""
    yield from ()


class Pending:
    """A collective under way. The tensors given to it are the caller's again when `wait` returns.

    One of several exchanges, one after the other, goes on to the next only while somebody waits or looks.
    """

    def __init__(self, transport: Transport, steps: Steps, exchanges: int = 1) -> None:
        self.exchanges = exchanges
        self._transport = transport
        self._steps = steps
        self._arrivals: list[Arrival] = []
        self._exchange: Exchange | None = None
        self._error: Exception | None = None
        self._advance(None)

    def wait(self, timeout_s: float | None = None) -> list[Arrival]:
        """Blocks until the collective is done and returns what each of its exchanges brought."""
        if self._error is not None:
            raise self._error
        while self._exchange is not None:
            self._step(self._exchange, timeout_s)
        return self._arrivals

    @property
    def ended(self) -> bool:
        """Whether `wait` would return at once, as far as is known without looking."""
        return self._exchange is None or self._error is not None

    def done(self) -> bool:
        """Whether the collective has ended, well or not, so that `wait` does not block; begins what comes next."""
        while not self.ended and self._exchange is not None and self._exchange.done():
            try:
                self._step(self._exchange, None)
            except Exception:
                return True  # and `wait` will raise it again
        return self.ended

    def _step(self, exchange: Exchange, timeout_s: float | None) -> None:
        try:
            arrival = exchange.wait(timeout_s)
            self._arrivals.append(arrival)
            self._advance(arrival)
        except Exception as error:
            # Of an exchange that goes on, only the waiting is over.
            if self._exchange is not exchange or exchange.done():
                self._error = error
            raise

    def _advance(self, arrival: Arrival | None) -> None:
        self._exchange = None
        try:
            plan = next(self._steps) if arrival is None else self._steps.send(arrival)
        except StopIteration:
            return
        self._exchange = self._transport.post(plan)


class Group:
    """Ranks that call collectives together.

    Every member makes the group with the same name and ranks and calls the same collectives in the same order.
    Collectives return a `Pending` at once; `wait` on it. Within a group, a rank is a position in `ranks`.
    """

    def __init__(self, transport: Transport, ranks: Sequence[int] | None = None, *, name: str = "world") -> None:
        self.transport = transport
        self.ranks = tuple(range(transport.world) if ranks is None else ranks)
        if len(set(self.ranks)) != len(self.ranks) or not all(0 <= rank < transport.world for rank in self.ranks):
            raise ValueError(f"ranks must be distinct ranks of a world of {transport.world}, got {self.ranks}")
        if transport.rank not in self.ranks:
            raise ValueError(f"rank {transport.rank} is not among the group's ranks {self.ranks}")
        self.name = name
        self.rank = self.ranks.index(transport.rank)
        self.size = len(self.ranks)
        self._channel = (name, *self.ranks)

    def turned(self, order: Sequence[int]) -> "Group":
        """The same ranks in another order, which decides who reduces what; their exchanges are this group's."""
        other = Group(self.transport, [self.ranks[position] for position in order], name=self.name)
        other._channel = self._channel
        return other

    def start(self, steps: Steps, exchanges: int = 1) -> Pending:
        """Begins a collective of so many exchanges."""
        return Pending(self.transport, steps, exchanges)

    def reserve(self, count: int = 1) -> tuple[int, int]:
        """The group's channel and the first of `count` sequence numbers."""
        return self.transport.channels.take(self._channel, count)

    def begun_elsewhere(self) -> list[tuple[int, bytes]]:
        """Which ranks have begun the next exchange, which this one has not, and the first chunk of what each sends."""
        firsts = self.transport.peek(*self.transport.channels.peek(self._channel))
        return [(self.ranks.index(rank), payload) for rank, payload in firsts if rank in self.ranks]

    def reserve_pair(self, source: int, target: int, tag: int) -> tuple[int, int]:
        """The channel of messages from one rank to another, and the next sequence number on it."""
        return self.transport.channels.take((*self._channel, "pair", source, target, tag))

    def others(self) -> list[int]:
        """The other ranks of the group, beginning with the next one, so that not all send to the same one first."""
        return [(self.rank + i) % self.size for i in range(1, self.size)]

    def check_rank(self, rank: int, what: str) -> None:
        """Raises ValueError unless `rank` is one of the group's."""
        if not 0 <= rank < self.size:
            raise ValueError(f"{what} must lie in [0, {self.size}), got {rank}")

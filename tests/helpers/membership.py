"""A schedule of views, driven by hand: ranks in one process that train with ElasticSampler, die, leave and join."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from stormtorch import ElasticSampler

Give = Callable[[], bytes]
Take = Callable[[dict[int, bytes]], None]
Loading = Callable[[ElasticSampler], Any]
"""Makes the loader of a sampler."""


@dataclass(frozen=True)
class ScheduledView:
    number: int
    members: tuple[int, ...]
    step: int
    base: int


class Session:
    """What a sampler sees of a session; the schedule plays the part of the network."""

    def __init__(self, rank: int, view: ScheduledView, given: dict[int, bytes]) -> None:
        self.group = SimpleNamespace(transport=SimpleNamespace(rank=rank))
        self.view = view
        self.given = given
        """What others gave in the transition that brought this process in."""
        self.give: Give | None = None
        self.take: Take | None = None
        self.stepped: Callable[[int], None] = lambda number: None

    def carry(self, name: str, give: Give, take: Take) -> None:
        self.give, self.take = give, take
        if self.given:
            take(self.given)

    def on_step(self, callback: Callable[[int], None]) -> None:
        self.stepped = callback


class Loader:
    """Draws ahead as DataLoader does: some batches at the beginning, then one more for each that comes out."""

    in_order = True

    def __init__(self, sampler: ElasticSampler, ahead: int) -> None:
        self.batch_sampler = sampler
        self.ahead = ahead

    def __iter__(self) -> Iterator[list[int]]:
        draws = iter(self.batch_sampler)
        waiting: deque[list[int]] = deque()
        for _ in range(self.ahead):
            waiting.extend(_one(draws))
        while True:
            if not waiting and self.ahead == 0:
                waiting.extend(_one(draws))
            if not waiting:
                return
            batch = waiting.popleft()
            if self.ahead:
                waiting.extend(_one(draws))
            yield batch


def _one(draws: Iterator[list[int]]) -> list[list[int]]:
    return [batch for batch in [next(draws, None)] if batch is not None]


class Rank:
    """One process: a sampler and a loop over it."""

    def __init__(self, sampler: ElasticSampler, session: Session, loader: Loading, *, plain: bool) -> None:
        self.sampler = sampler
        self.session = session
        sampler.attach(SimpleNamespace(session=session))  # type: ignore[arg-type]
        self.loader = loader(sampler)
        self.plain = plain
        self.loop: Iterator[Iterable[Any]] | None = None
        self.settled = session.view.number
        """The last view that was in place and had this rank."""
        self.hand: list[tuple[list[int], float]] = []
        """Batches of the step in progress, and their weights."""

    def start(self) -> None:
        """Takes the batches of the next step, as forward and backward would."""
        while True:
            if self.loop is None:
                self.loop = self._plain() if self.plain else self.sampler.steps(self.loader)
            step = next(self.loop, None)
            if step is not None:
                break
            self.loop = None  # the next epoch, or the rest of this one
        self.hand = [([int(index) for index in batch], self.sampler.scale) for batch in step]

    def _plain(self) -> Iterator[list[list[int]]]:
        yield from ([batch] for batch in self.loader)


class Schedule:
    """All ranks, and what they have trained on."""

    def __init__(
        self,
        length: int,
        ranks: int,
        *,
        ahead: int = 2,
        plain: bool = False,
        load: Loading | None = None,
        **settings: Any,
    ) -> None:
        self.length = length
        self.settings = settings
        self.plain = plain
        self.load: Loading = load or (lambda sampler: Loader(sampler, ahead))
        self.settled = 1
        self.view = ScheduledView(1, tuple(range(ranks)), 0, 0)
        self.ranks = {rank: self._rank(rank, {}) for rank in self.view.members}
        self.outside: dict[int, Rank] = {}
        self.used: dict[int, list[int]] = {}
        """Samples by epoch, in the order of training."""
        self.totals: list[int] = []
        """Samples of each step, over all ranks."""
        self.idle = 0
        """Batches that only kept a rank busy."""

    def _rank(self, rank: int, given: dict[int, bytes]) -> Rank:
        sampler = ElasticSampler(self.length, **self.settings)
        return Rank(sampler, Session(rank, self.view, given), self.load, plain=self.plain)

    @property
    def epoch(self) -> int:
        (epoch,) = {rank.sampler.epoch for rank in self.ranks.values()}
        return epoch

    def start(self) -> None:
        for rank in self.ranks.values():
            rank.start()

    def change(self, members: Sequence[int], taken_by: Sequence[int] | None = None) -> None:
        """Begins a view while all ranks are in the middle of a step.

        Args:
            members: Ranks of the view; those that nobody has yet are new processes.
            taken_by: Members that get as far as `take` before yet another view comes; None: all of them.
        """
        self.view = ScheduledView(self.view.number + 1, tuple(sorted(members)), self.view.step, self.settled)
        back = {rank: self.outside.pop(rank) for rank in members if rank in self.outside}
        givers = {**self.ranks, **back}
        given = {rank: each.session.give() for rank, each in givers.items() if rank in members and each.session.give}
        for rank in members if taken_by is None else taken_by:
            if rank in givers:
                each = givers[rank]
                each.session.view = self.view
                assert each.session.take is not None
                each.session.take(given)
        for each in back.values():
            if each.settled != self.settled:
                each.hand = []  # a process that comes back has no gradient that counts
        if taken_by is not None:
            self.ranks = {rank: each for rank, each in givers.items()}
            return
        self.ranks = {rank: each for rank, each in givers.items() if rank in members}
        for rank in members:
            if rank not in self.ranks:
                self.ranks[rank] = self._rank(rank, given)
                self.ranks[rank].start()
        self.settled = self.view.number
        for each in self.ranks.values():
            each.settled = self.settled

    def cut_off(self, rank: int) -> None:
        """Leaves a live process out of the next view; it may come back."""
        self.outside[rank] = self.ranks.pop(rank)

    def complete(self) -> None:
        """Completes the step on all members."""
        epoch, total = self.epoch, 0
        for rank in self.ranks.values():
            for batch, weight in rank.hand:
                if weight > 0:
                    self.used.setdefault(epoch, []).extend(batch)
                    total += len(batch)
                else:
                    self.idle += 1
            rank.hand = []
        self.totals.append(total)
        self.view = replace(self.view, step=self.view.step + 1)
        for rank in self.ranks.values():
            rank.session.stepped(self.view.step - 1)

    def step(self) -> None:
        self.start()
        self.complete()

    def finish(self, epochs: int = 1) -> None:
        """Trains without further changes until a number of epochs is complete."""
        while self.epoch < epochs:
            self.step()

"""Calls that all ranks make: `model.state_dict()`, `exact()` and `optimizer.state_dict()`.

A rank that makes one tells the others which, and at which step it is. The others may make the same call. Or they wait
for something else, in backward() or in a barrier, say: then they see what was begun and take part in it from there, as
if they had made the call, without any change to what they have. So `if rank == 0: torch.save(model.state_dict(), ...)`
is exact, and no other rank has to know of it. A rank that is about to leave takes part as well, until all others are
about to leave too, or have begun another step without it.

A slow rank may take part in a call that it is about to make itself. So what it got is kept until the next step, and its
own call is answered from there: the others have theirs, and do not come again.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from stormtorch import collectives
from stormtorch.collectives import Group
from stormtorch.errors import ExchangeTimeout, StormError
from stormtorch.reliability import Reliability
from stormtorch.waiting import BACKWARD, doing, is_elsewhere, waits_in

TAKES_PART, MODEL_STATE, EXACT_MODEL, OPTIMIZER_STATE, LEAVES = range(5)
NAMES = (
    "a call of another rank",
    "model.state_dict()",
    "exact()",
    "optimizer.state_dict()",
    "destroy_process_group() or the end of its program",
)
"""Of calls, by number."""
# Steps travel in two float32s, which say so many exactly.
_STEPS = 1 << 20


class _Told(NamedTuple):
    """What a rank tells the others when a call begins."""

    call: int
    steps: int

    @property
    def asks(self) -> bool:
        """Whether it wants something of the others. Who leaves, or only takes part, does not."""
        return self.call not in (TAKES_PART, LEAVES)

    def numbers(self) -> list[float]:
        return [float(self.call), float(self.steps // _STEPS), float(self.steps % _STEPS), 0.0]

    @classmethod
    def read(cls, numbers: list[float]) -> _Told | None:
        """None if it did not arrive."""
        return None if numbers[0] < 0.0 else cls(int(numbers[0]), int(numbers[1]) * _STEPS + int(numbers[2]))


@dataclass(slots=True)
class _Kept:
    """What came of calls that this rank has only taken part in, of one kind and at one step."""

    steps: int
    times: int
    """Calls that this rank has not made itself since."""
    present: list[int]
    result: object


class Calls:
    """The calls of one training.

    Args:
        group: Who takes part. Nothing but calls has its exchanges there.
        reliability: Of the exchange in which ranks meet.
        wait_s: Error after waiting for so long.
        steps: Tells how many this rank has made.
        ready: Whether this rank could take part now.
        serve: Takes part in a call, by number, changes nothing here, and returns what came of it.
    """

    def __init__(
        self,
        group: Group,
        reliability: Reliability,
        wait_s: float,
        *,
        steps: Callable[[], int],
        ready: Callable[[], bool],
        serve: Callable[[int], object],
    ) -> None:
        self.group = group
        self._reliability = reliability
        self._wait_s = wait_s
        self._steps = steps
        self._ready = ready
        self._serve = serve
        self._busy = False
        self._kept: dict[bool, _Kept] = {}
        # Other threads that wait in a collective cannot know whether a step is being made.
        self._thread = threading.get_ident()
        group.transport.servers.offer(self)

    @contextlib.contextmanager
    def call(self, call: int) -> Iterator[tuple[list[int], object]]:
        """Within it, all ranks take part in a call.

        Gives the ranks that are there, and what came of the call if this rank has taken part in it before.

        Raises:
            StormError: A rank has made another number of steps, or makes another call.
            ExchangeTimeout: A rank has not come.
        """
        kept = self._kept.get(call == OPTIMIZER_STATE)
        if kept is not None and kept.steps == self._steps() and kept.times > 0:
            kept.times -= 1
            yield kept.present, kept.result
            return
        with doing(NAMES[call]), self._occupied():
            yield sorted(self._meet(call)), None

    def forget(self) -> None:
        """Drops what was kept: a step is about to be made."""
        self._kept.clear()

    def awaited(self) -> bool:
        """Whether other ranks have begun a call that this one can take part in now."""
        if self._busy or (is_elsewhere() and threading.get_ident() != self._thread):
            return False
        mine, seen = self._steps(), False
        for _, payload in self.group.begun_elsewhere():
            told = _Told.read(list(struct.unpack("4f", payload))) if len(payload) == 16 else None
            if told is None or told.call == TAKES_PART:
                continue
            if told.call == LEAVES and waits_in() != BACKWARD:
                continue  # it may stay until this rank leaves too, unless this one goes on with another step
            if told.steps < mine:
                return True  # it comes too late, and both are told so
            seen = seen or told.steps == mine  # who is ahead is met later
        return seen and self._ready()

    @torch.no_grad()
    def serve(self) -> None:
        """Takes part in a call that others have begun."""
        with self._occupied():
            self._answer(self._meet(TAKES_PART))

    @torch.no_grad()
    def part(self) -> None:
        """Takes part in what others still call for, until they leave too, or go on without this rank."""
        with doing(NAMES[LEAVES]), self._occupied(), contextlib.suppress(StormError):
            while True:
                found = self._meet(LEAVES)
                if not any(told.asks for told in found.values()):
                    return
                self._answer(found)

    def _answer(self, found: dict[int, _Told]) -> None:
        calls = {told.call for told in found.values() if told.asks}
        if not calls:
            return  # the caller has given up meanwhile, or leaves
        result = self._serve(min(calls))
        kept = self._kept.get(OPTIMIZER_STATE in calls)
        times = kept.times if kept is not None and kept.steps == self._steps() else 0
        self._kept[OPTIMIZER_STATE in calls] = _Kept(self._steps(), times + 1, sorted(found), result)

    @contextlib.contextmanager
    def _occupied(self) -> Iterator[None]:
        # Of what comes next on the channel, only the first of a call may be taken for the beginning of one.
        before, self._busy = self._busy, True
        try:
            yield
        finally:
            self._busy = before

    def _meet(self, call: int) -> dict[int, _Told]:
        group = self.group
        all_N4 = [torch.full((4,), -1.0, device="cpu") for _ in range(group.size)]
        all_N4[group.rank].copy_(torch.tensor(_Told(call, self._steps()).numbers(), device="cpu"))
        try:
            collectives.all_gather(
                group, all_N4, all_N4[group.rank], reliability=self._reliability, timeout_s=self._wait_s
            ).wait()
        except ExchangeTimeout as error:
            raise ExchangeTimeout(
                f"rank {group.rank}: {NAMES[call]} has waited {self._wait_s:g} s (collective_wait_s): every rank must "
                "make this call, or wait for others in backward() or a collective, before its next step; "
                f"{str(error).removeprefix(f'rank {group.rank}: ')}"
            ) from error
        found = {peer: told for peer in range(group.size) if (told := _Told.read(all_N4[peer].tolist())) is not None}
        self._compare(found)
        return found

    def _compare(self, found: dict[int, _Told]) -> None:
        callers = [(peer, told) for peer, told in found.items() if told.asks]
        if not callers:
            return
        rank, (first, leader) = self.group.rank, callers[0]
        for peer, told in found.items():
            if told.steps != leader.steps:
                raise StormError(
                    f"rank {rank}: rank {first} has called {NAMES[leader.call]} after {leader.steps} steps, and rank "
                    f"{peer} has made {told.steps}: call it on every rank, or between step() and the next backward()"
                )
        for peer, told in callers:
            if (told.call == OPTIMIZER_STATE) != (leader.call == OPTIMIZER_STATE):
                raise StormError(
                    f"rank {rank}: rank {first} has called {NAMES[leader.call]} and rank {peer} {NAMES[told.call]}: "
                    "call them in the same order on every rank, or on one rank alone"
                )

"""Pipeline of a hierarchical collective: while one piece travels between machines, others move inside a machine."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from stormtorch.collectives.base.group import Pending
from stormtorch.errors import Closed, StormError
from stormtorch.exchange.exchange import ExchangeResult

Stage = Callable[[], Pending]
"""Function that begins a collective."""

# Pieces that travel between machines at once: the next one must start before the last has ended.
_AT_ONCE = 6


@dataclass(frozen=True, kw_only=True)
class PipelinePiece:
    """Stages of one piece: those of each kind begin together, once all of the previous kind have ended."""

    before: Sequence[Stage] = ()
    """Exact collectives inside the machine."""
    across: Sequence[Stage] = ()
    """Collectives between machines, the only ones that may be lossy."""
    after: Sequence[Stage] = ()
    """Exact collectives inside the machine."""

    def kinds(self) -> list[tuple[str, Sequence[Stage]]]:
        """Lists the three kinds of stages, in order."""
        return [("before", self.before), ("across", self.across), ("after", self.after)]


class ExchangeResultAcross(ExchangeResult):
    """Result of an exchange between machines, in which each message stands for all ranks of a machine."""

    __slots__ = ("_each",)

    def __init__(self, arrival: ExchangeResult, each: int) -> None:
        super().__init__(arrival._outcome, arrival.rank)
        self._each = each

    def counts(self) -> torch.Tensor:
        """Number of ranks that contributed to each chunk of this rank's reduction, this rank included."""
        return super().counts() * self._each


class Pipeline(Pending):
    """Started collective made of pieces. `wait` returns the results of the exchanges between machines.

    Stages begin in the same order on all ranks, so no deadlock is possible. If a stage fails, this rank begins and
    cancels all that are left, and the engine reports the failure cause to its peers. So all ranks fail and name the
    culprit, even those that have no exchange with it.

    Args:
        pieces: The pieces, in order.
        each: Number of ranks on each machine.
    """

    def __init__(self, pieces: Sequence[PipelinePiece], each: int) -> None:
        self.exchanges = sum(len(stages) for piece in pieces for _, stages in piece.kinds())
        self._pieces = pieces
        self._each = each
        self._arrivals: list[ExchangeResult] = []
        self._left = {(at, kind): stages for at, piece in enumerate(pieces) for kind, stages in piece.kinds()}
        self._open: list[Pending] = []
        self._error: Exception | None = None
        self._order = self._run()
        self._current: Pending | None = next(self._order, None)

    def wait(self, timeout_s: float | None = None) -> list[ExchangeResult]:
        """Blocks until the collective has ended and returns the results of its exchanges between machines."""
        if self._error is not None:
            raise self._error
        while self._current is not None:
            self._pass(self._current, timeout_s)
        return self._arrivals

    def done(self) -> bool:
        """Whether the collective has ended, well or not; starts the next stages when one has ended."""
        while not self.ended and self._current is not None and self._current.done():
            try:
                self._pass(self._current, None)
            except Exception:
                return True  # `wait` will raise the error again
        return self.ended

    @property
    def ended(self) -> bool:
        """Whether the collective is already known to have ended, without polling the transport."""
        return self._current is None or self._error is not None

    def cancel(self) -> None:
        """Cancels the collective. Its tensors belong to the caller again; `wait` raises `Closed` from now on."""
        if self.ended:
            return
        self._abort()
        self._error = Closed("the collective was cancelled")

    def _run(self) -> Iterator[Pending]:
        """Begins stages, and yields each that must end before the next step."""
        count = len(self._pieces)
        before = [self._begin(0, "before")] if count else []
        across: list[list[Pending]] = []
        after: list[Pending] = []
        for at in range(count + _AT_ONCE):
            if at < count:
                if at + 1 < count:
                    before.append(self._begin(at + 1, "before"))
                yield from before[at]
                across.append(self._begin(at, "across"))
            if at >= _AT_ONCE and at - _AT_ONCE < count:
                for pending in across[at - _AT_ONCE]:
                    yield pending
                    self._arrivals += [ExchangeResultAcross(arrival, self._each) for arrival in pending.wait()]
                after += self._begin(at - _AT_ONCE, "after")
        yield from after

    def _begin(self, piece: int, kind: str) -> list[Pending]:
        begun = []
        for begin in self._left.pop((piece, kind)):
            begun.append(begin())
            self._open.append(begun[-1])
        return begun

    def _pass(self, current: Pending, timeout_s: float | None) -> None:
        try:
            current.wait(timeout_s)
            self._open.remove(current)
            self._current = next(self._order, None)
        except Exception as error:
            # If the stage still runs, only this wait timed out, not the collective.
            if self._current is not current or current.ended:
                self._error = error
                self._abort()
            raise

    def _abort(self) -> None:
        """Cancels all stages here and at the peers, even those that have not begun."""
        for pending in self._open:
            pending.cancel()
        for stages in self._left.values():
            for begin in stages:
                with contextlib.suppress(StormError):  # the transport may be closed
                    begin().cancel()
        self._open.clear()
        self._left.clear()

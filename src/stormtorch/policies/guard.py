"""The measured loss, and the convergence guard: the broadcast is exact while the network is worse than it may be."""

import math
from typing import Any, Generic, TypeVar

import torch

# What is known before the first chunk, worth so many chunks of which none was lost: n losses in a row then make a lead
# of n/20 updates and not of 9, and a network that loses nothing is trained on without any lead, bit for bit.
_PRIOR_CHUNKS = 20.0
# Counts are kept for so many steps, and in any case until they are of so many chunks: few chunks tell little.
_MEMORY_STEPS = 20
_MEMORY_CHUNKS = 500
# The guard also looks at fewer, so that it hears of an outage at once where many chunks tell of it.
_QUICK_STEPS = 4
_QUICK_CHUNKS = 100
# Standard errors by which those must be above the limit.
_SURE = 3.0
# Once exact, so for this many steps at least, and until loss is this much below the limit.
_HOLD = 20
_RELIEF = 0.9


Value = TypeVar("Value", float, torch.Tensor)


class LossMeter(Generic[Value]):
    """The fraction of chunks that was lost lately, from counts that fade.

    Args:
        zero: A number, or a tensor of zeros where many links are measured at once.
        steps: Counts fade with each step by one over so many at most.
        chunks: They fade by less where a step has few chunks, so that counts of about so many are kept.
        prior: Chunks that count as arrived before the first; without any, there is no value before the first.
    """

    def __init__(
        self,
        zero: Value,
        *,
        steps: int = _MEMORY_STEPS,
        chunks: int = _MEMORY_CHUNKS,
        prior: float = _PRIOR_CHUNKS,
    ) -> None:
        self._steps, self._chunks = steps, chunks
        self._lost: Value = zero
        self._sent: Value = zero + prior

    @property
    def value(self) -> Value:
        """Zero as long as nothing was lost."""
        found: Value = self._lost / self._sent
        return found

    @property
    def state(self) -> tuple[Value, Value]:
        """For `restore`."""
        return self._lost, self._sent

    def restore(self, lost: Value, sent: Value) -> None:
        """Goes on from a `state`."""
        self._lost, self._sent = lost, sent

    def add(self, lost: Value, sent: Value) -> None:
        """Counts the chunks of one step."""
        fade = _at_most(sent / self._chunks, 1.0 / self._steps)
        self._lost = self._lost - fade * self._lost + lost
        self._sent = self._sent - fade * self._sent + sent


def _at_most(value: Any, most: float) -> Any:
    return value.clamp(max=most) if isinstance(value, torch.Tensor) else min(value, most)


class Guard:
    """One rank's opinion on whether the broadcast should be exact. Where any rank wants it, all do it.

    Args:
        limit: The loss of the broadcast that is tolerated; None tolerates all.
        max_lag: The age of a copy that is tolerated.
    """

    def __init__(self, limit: float | None, max_lag: int | None) -> None:
        self.alarm = False
        self._limit = limit
        self._max_lag = max_lag
        self._loss = LossMeter(0.0)
        self._quick = LossMeter(0.0, steps=_QUICK_STEPS, chunks=_QUICK_CHUNKS)
        self._since = 0

    @property
    def state(self) -> tuple[bool, int, tuple[float, float], tuple[float, float]]:
        """For `restore`."""
        return self.alarm, self._since, self._loss.state, self._quick.state

    def restore(self, alarm: bool, since: int, loss: tuple[float, float], quick: tuple[float, float]) -> None:
        """Goes on from a `state`."""
        self.alarm, self._since = alarm, since
        self._loss.restore(*loss)
        self._quick.restore(*quick)

    def watch(self, lost: float, sent: float, oldest: int) -> None:
        """Takes notice of one step.

        Args:
            lost: Chunks of first passes from all owners that did not arrive: what an exact broadcast repairs is lost.
            sent: Of so many.
            oldest: Age of the oldest copy.
        """
        limit = self._limit
        if limit is None:
            return
        self._loss.add(lost, sent)
        self._quick.add(lost, sent)
        too_much = self._loss.value > limit or self._surely_above(limit)
        too_old = self._max_lag is not None and oldest > self._max_lag
        self._since += 1
        if not self.alarm and (too_much or too_old):
            self.alarm, self._since = True, 0
        elif self.alarm and self._since >= _HOLD and not too_old and not too_much:
            self.alarm = self._loss.value >= _RELIEF * limit

    def _surely_above(self, limit: float) -> bool:
        """Whether the latest chunks alone show it, by more than chance does."""
        _, counted = self._quick.state
        return self._quick.value > limit + _SURE * math.sqrt(limit * (1.0 - limit) / counted)

"""Loss meters and the convergence guard, which makes the broadcast exact while loss is too high."""

import math
from typing import Any, Generic, TypeVar

import torch

# A meter starts with a prior of this many arrived chunks. So n initial losses make a lead of n/20 updates instead of 9,
# and a lossless network makes no lead at all, bit for bit.
_PRIOR_CHUNKS = 20.0
# Counts decay over this many steps, or more slowly so that they cover at least this many chunks.
_MEMORY_STEPS = 20
_MEMORY_CHUNKS = 500
# The guard has a second, faster meter, which detects an outage at once if a step has many chunks.
_QUICK_STEPS = 4
_QUICK_CHUNKS = 100
# Standard errors by which the second meter must exceed the limit.
_SURE = 3.0
# Hysteresis: least number of exact steps, and the fraction of the limit below which loss must then fall.
_HOLD = 20
_RELIEF = 0.9


Value = TypeVar("Value", float, torch.Tensor)


class LossMeter(Generic[Value]):
    """Measures the recent fraction of lost chunks, from exponentially decaying counts.

    Args:
        zero: 0.0, or a tensor of zeros to measure many links at once.
        steps: Each step decays the counts by at most 1/steps.
        chunks: Least number of chunks that the counts cover: steps with few chunks decay them less.
        prior: Chunks that count as arrived before the first. With 0, there is no value before the first.
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
        """Recent fraction of lost chunks; zero while nothing was lost."""
        found: Value = self._lost / self._sent
        return found

    @property
    def state(self) -> tuple[Value, Value]:
        """Chunks lost and sent, as `restore` takes them."""
        return self._lost, self._sent

    def restore(self, lost: Value, sent: Value) -> None:
        """Continues from a `state`."""
        self._lost, self._sent = lost, sent

    def add(self, lost: Value, sent: Value) -> None:
        """Counts the chunks of one step."""
        fade = _at_most(sent / self._chunks, 1.0 / self._steps)
        self._lost = self._lost - fade * self._lost + lost
        self._sent = self._sent - fade * self._sent + sent

    def translate(self, factor: Value, most: Value) -> None:
        """Converts the counts to another redundancy; see `rules.residual_loss_ratio`.

        Args:
            factor: Loss with the new redundancy over that with the old one.
            most: Loss without parity, which is an upper bound.
        """
        self._lost = _at_most(self._lost * factor, most * self._sent)


def _at_most(value: Any, most: Any) -> Any:
    return value.clamp(max=most) if isinstance(value, torch.Tensor) else min(value, most)


class ConvergenceGuard:
    """Convergence guard of one rank: requests an exact broadcast. If any rank requests it, all broadcast exactly.

    Args:
        limit: Highest tolerated loss of the broadcast; None tolerates any.
        max_lag: Highest tolerated age of a copy; None tolerates any.
    """

    def __init__(self, limit: float | None, max_lag: int | None) -> None:
        self.alarm = False
        """Whether this rank requests an exact broadcast."""
        self._limit = limit
        self._max_lag = max_lag
        self._loss = LossMeter(0.0)
        self._quick = LossMeter(0.0, steps=_QUICK_STEPS, chunks=_QUICK_CHUNKS)
        self._since = 0

    @property
    def state(self) -> tuple[bool, int, tuple[float, float], tuple[float, float]]:
        """The alarm, the steps since it was last raised, and the meters' states, as `restore` takes them."""
        return self.alarm, self._since, self._loss.state, self._quick.state

    def restore(self, alarm: bool, since: int, loss: tuple[float, float], quick: tuple[float, float]) -> None:
        """Continues from a `state`."""
        self.alarm, self._since = alarm, since
        self._loss.restore(*loss)
        self._quick.restore(*quick)

    def watch(self, lost: float, sent: float, oldest: int) -> None:
        """Updates the alarm after one step.

        Args:
            lost: Chunks of all owners lost in the first pass, whether retransmitted later or not.
            sent: Chunks that were sent in the first pass.
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
        """Whether the loss of the latest chunks exceeds the limit with statistical significance."""
        _, counted = self._quick.state
        return self._quick.value > limit + _SURE * math.sqrt(limit * (1.0 - limit) / counted)

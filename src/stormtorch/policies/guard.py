"""The convergence guard: exact while the network is worse than the settings allow for."""

from typing import Generic, TypeVar

import torch

# How quickly the measured loss is forgotten: about so many steps.
_MEMORY = 20
# Once exact, so for this many steps at least, and until loss is this much below the limit.
_HOLD = 20
_RELIEF = 0.9


Value = TypeVar("Value", float, torch.Tensor)


class Smoothed(Generic[Value]):
    """A mean of the latest values, right from the first one on.

    Args:
        zero: What it is before the first: a number, or a tensor of them.
        memory: How quickly values are forgotten.
    """

    def __init__(self, zero: Value, memory: int = _MEMORY) -> None:
        self._decay = 1.0 - 1.0 / memory
        self._sum: Value = zero
        self._weight = 0.0

    @property
    def value(self) -> Value:
        """`zero` before the first."""
        mean: Value = self._sum / self._weight if self._weight else self._sum
        return mean

    @property
    def state(self) -> tuple[Value, float]:
        """For `restore`."""
        return self._sum, self._weight

    def restore(self, total: Value, weight: float) -> None:
        """Goes on from a `state`."""
        self._sum, self._weight = total, weight

    def add(self, value: Value) -> None:
        """The next one."""
        self._sum = self._decay * self._sum + (1.0 - self._decay) * value
        self._weight = self._decay * self._weight + (1.0 - self._decay)


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
        self._loss = Smoothed(0.0)
        self._since = 0

    @property
    def state(self) -> tuple[bool, int, tuple[float, float]]:
        """For `restore`."""
        return self.alarm, self._since, self._loss.state

    def restore(self, alarm: bool, since: int, loss: tuple[float, float]) -> None:
        """Goes on from a `state`."""
        self.alarm, self._since = alarm, since
        self._loss.restore(*loss)

    def watch(self, loss: float, oldest: int) -> None:
        """Takes notice of one step.

        Args:
            loss: Of first passes from all owners: what an exact broadcast repairs counts as lost.
            oldest: Age of the oldest copy.
        """
        if self._limit is None:
            return
        self._loss.add(loss)
        too_old = self._max_lag is not None and oldest > self._max_lag
        self._since += 1
        if not self.alarm and (self._loss.value > self._limit or too_old):
            self.alarm, self._since = True, 0
        elif self.alarm and self._since >= _HOLD and not too_old and self._loss.value < _RELIEF * self._limit:
            self.alarm = False

"""The interface of virtual workers, whether owners or workers run the optimizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from stormtorch.telemetry.ledger import LedgerRow
from stormtorch_lab.simulation.setting import Setting

Evaluate = Callable[..., tuple[float, float]]
"""Evaluates a model: returns the validation loss and accuracy.

`evaluate(model)`, or `evaluate(model, worker)` if models have personal parts.
"""


class Workers(ABC):
    """All virtual workers of one simulated training."""

    policy: Any
    """The user's policy; each step may have another one of the same class."""
    optimizers: list[torch.optim.Optimizer]
    """One optimizer for all owners together, or one for each worker; then those of personal parts."""

    @abstractmethod
    def step(self, number: int, batches: Callable[[int, int], Any]) -> tuple[torch.Tensor, LedgerRow | None]:
        """Makes one step of all workers. Returns their mean loss, and a row if anything was exchanged.

        Args:
            number: Number of the step.
            batches: Returns the stacked batches of workers from its first argument to before its second.
        """

    @abstractmethod
    def judge(self, evaluate: Evaluate) -> tuple[float, float]:
        """Evaluates the parameters that represent all workers."""

    @abstractmethod
    def drift(self) -> float:
        """Returns the mean squared difference per parameter between two replicas, over all pairs of workers."""

    @property
    @abstractmethod
    def how(self) -> str:
        """How gradients are computed: "batched" or "loop"."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Returns all that a later process needs to continue."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a state dict."""


def judge_each(
    setting: Setting, judge: Callable[[int, Evaluate], tuple[float, float]], evaluate: Evaluate, workers: int
) -> tuple[float, float]:
    """Returns the mean result of the first workers' models; every process evaluates those of its own workers."""
    first, last = setting.processes.part(setting.workers)
    sums = torch.zeros(2, dtype=torch.float64)
    for worker in range(first, min(last, workers)):
        sums += torch.tensor(judge(worker, evaluate), dtype=torch.float64)
    loss, right = (setting.processes.all_reduce(sums) / workers).tolist()
    return loss, right

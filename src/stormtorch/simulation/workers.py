"""What a simulation needs of its virtual workers, whoever runs their optimizers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from stormtorch.policies.ledger import Row

Evaluate = Callable[[nn.Module], tuple[float, float]]
"""Judges a model: the loss and the fraction of right answers on what is held out."""


class Workers(ABC):
    """All virtual workers of one simulated training."""

    policy: Any
    """The user's; it may be another one of the same kind at every step."""
    optimizers: list[torch.optim.Optimizer]
    """One for all owners together, or one for each worker."""

    @abstractmethod
    def step(self, number: int, batches: Callable[[int, int], Any]) -> tuple[torch.Tensor, Row | None]:
        """Makes one step of all workers. Returns their mean loss, and what happened if anything was exchanged.

        Args:
            number: Number of the step.
            batches: Gives the stacked batches of some workers.
        """

    @abstractmethod
    def judge(self, evaluate: Evaluate) -> tuple[float, float]:
        """Judges the parameters that stand for all workers."""

    @abstractmethod
    def drift(self) -> float:
        """Mean squared difference per parameter between two replicas, on average over all pairs of workers."""

    @property
    @abstractmethod
    def how(self) -> str:
        """How gradients are computed: "batched" or "loop"."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """All that a later process needs to go on."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a state dict."""

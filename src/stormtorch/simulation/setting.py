"""What the policies of a simulation have in common: who, where, what may be lost, and how the vector is cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import nn

from stormtorch.network.loss import LossModel
from stormtorch.simulation.chunks import Cut
from stormtorch.simulation.gradients import Gradients, How, Loss
from stormtorch.simulation.processes import Together

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
"""Makes an optimizer for some parameters: `lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)`."""


@dataclass
class Reuse:
    """What simulations of the same model, loss and batch size can share, one after the other."""

    gradients: Gradients | None = None


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Of one simulated training."""

    workers: int
    network: LossModel
    seed: int
    cut: Cut
    elements: int
    """Of the model, without padding."""
    device: torch.device
    loss: Loss
    clip: float | None
    wire: torch.dtype
    at_once: int
    how: How
    precision: torch.dtype
    capture: bool
    fuse: bool
    together: Together
    reuse: Reuse | None = None

    def gradients(self, model: nn.Module, workers: int) -> Gradients:
        """For so many workers of this process."""
        known = None if self.reuse is None else self.reuse.gradients
        fits = known is not None and known.at_once == min(self.at_once, workers)
        if known is not None and fits and known.begin_again(model, self.cut, workers):
            return known
        made = Gradients(
            model,
            self.loss,
            self.cut,
            workers,
            min(self.at_once, workers),
            self.device,
            how=self.how,
            precision=self.precision,
            capture=self.capture,
            fuse=self.fuse,
        )
        if self.reuse is not None:
            self.reuse.gradients = made
        return made

    def with_at_once(self, at_once: int) -> Setting:
        """The same with another number of workers at a time."""
        return replace(self, at_once=at_once)

    def for_trial(self) -> Setting:
        """The same for one worker and a single step."""
        return replace(self, at_once=1, capture=False, fuse=False, reuse=None)

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        """What is left of values that travelled; the values themselves where nothing is lost by it."""
        return values if self.wire == torch.float32 else values.to(self.wire).float()

    def round_(self, values: torch.Tensor) -> None:
        """What is left of values that travelled; in place."""
        if self.wire != torch.float32:
            values.copy_(values.to(self.wire))

"""DiLoCo and StreamingDiLoCo: local SGD with an outer optimizer on the mean of the models."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from stormtorch.checks import check
from stormtorch.policies.memory import NO_MEMORY, Memory
from stormtorch.policies.rank_policy import RankPolicy


@dataclass(frozen=True, kw_only=True)
class DiLoCo(RankPolicy):
    """Rare exchanges: every rank makes `every` steps with the user's optimizer, then models are combined.

    Each parameter has an anchor at its owner. Ranks send their parameters; the owner takes the difference between the
    mean of arrivals and the anchor as outer gradient, makes a step of SGD with Nesterov momentum, and sends the new
    anchor. Anchors exist once and cannot diverge. If an anchor is lost, a rank continues with its own parameters.

    `outer_lr=1.0, momentum=0.0` is local SGD, and `together_until` makes it post-local SGD.
    """

    name: ClassVar[str] = "diloco"

    every: int = 100
    """Optimizer steps between two exchanges."""
    outer_lr: float = 0.7
    """Learning rate of the outer optimizer. 1 without momentum replaces the anchor by the mean."""
    momentum: float = 0.9
    """Momentum of the outer optimizer. It pays over hundreds of exchanges; with few, use 0.5 and `outer_lr=1`."""
    nesterov: bool = True
    """Whether the momentum is Nesterov's."""
    alpha: float = 0.0
    """Weight of a rank's own parameters when it accepts an anchor; the rest is the anchor."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check(0.0 < self.outer_lr <= 10.0, "outer_lr", "lie in (0, 10]", self.outer_lr)
        check(0.0 <= self.momentum < 1.0, "momentum", "lie in [0, 1)", self.momentum)
        check(0.0 <= self.alpha < 1.0, "alpha", "lie in [0, 1)", self.alpha)

    def begin_owner(self, owner: Memory, values: torch.Tensor) -> None:
        """Takes the initial parameters as the first anchor."""
        owner["anchor"] = values
        owner["speed"] = torch.zeros_like(values)

    def update(self, owner: Memory, combined: torch.Tensor) -> torch.Tensor:
        """Makes an outer step from the anchor towards the mean of the models that arrived."""
        change = combined - owner["anchor"]
        speed = owner["speed"].mul_(self.momentum).add_(change)
        step = change.add_(speed, alpha=self.momentum) if self.nesterov else speed
        return owner["anchor"].add_(step, alpha=self.outer_lr)

    def accept(
        self, own: torch.Tensor, received: torch.Tensor, arrived: torch.Tensor, rank: Memory = NO_MEMORY
    ) -> torch.Tensor:
        """Continues with the anchor mixed with a rank's own parameters, or with its own alone where it was lost.

        The less arrives, the more the anchor weighs in what does, so that the mean pull towards it stays the same.
        """
        if not self.alpha:
            return torch.where(arrived, received, own)
        share = max(rank.arrived, 1.0 - self.alpha)
        return torch.where(arrived, own.lerp(received, (1.0 - self.alpha) / share), own)


@dataclass(frozen=True, kw_only=True)
class StreamingDiLoCo(DiLoCo):
    """DiLoCo with fragments of the model that are exchanged in turn, while ranks continue to compute.

    A fragment is exchanged every `every` steps, and used `delay` steps later, mixed with the rank's own parameters.
    Where a part of a fragment is lost, a rank keeps its own parameters until the fragment's next turn.
    """

    name: ClassVar[str] = "streaming-diloco"

    fragments: int = 8
    """Parts of the model that are exchanged in turn."""
    delay: int = 1
    """Steps that a fragment may be in flight while ranks compute."""
    outer_lr: float = 0.4
    """Learning rate of the outer optimizer: lower than DiLoCo's, as the exchanged values are stale."""
    alpha: float = 0.5
    """Weight of a rank's own parameters when it accepts an anchor."""

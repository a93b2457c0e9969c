"""DiLoCo: ranks train apart for many steps, and owners take an outer step towards the mean of their models."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from stormtorch.checks import check
from stormtorch.policies.memory import NO_MEMORY, Memory
from stormtorch.policies.rank_policy import RankPolicy


@dataclass(frozen=True, kw_only=True)
class DiLoCo(RankPolicy):
    """Training that talks rarely: every rank makes `every` steps with the user's optimizer, then models are combined.

    Each parameter has an anchor at its owner. Ranks send their parameters; the owner takes the mean of those that
    arrived less the anchor as an outer gradient, makes a step of SGD with Nesterov momentum, and sends the new anchor.
    As anchors exist once, they cannot diverge. Where an anchor is lost, a rank goes on with its own parameters.

    `outer_lr=1.0, momentum=0.0` is local SGD, and `together_until` makes it post-local SGD.
    """

    name: ClassVar[str] = "diloco"

    every: int = 100
    """Optimizer steps between two exchanges."""
    outer_lr: float = 0.7
    """Learning rate of the outer optimizer. 1 without momentum replaces the anchor by the mean."""
    momentum: float = 0.9
    """Momentum of the outer optimizer. It pays over hundreds of exchanges; with few, 0.5 and a rate of 1 are faster."""
    nesterov: bool = True
    """Whether the outer optimizer looks ahead as Nesterov's does."""
    alpha: float = 0.0
    """Part of a rank's own parameters in what it continues with; the rest is the anchor."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check(0.0 < self.outer_lr <= 10.0, "outer_lr", "lie in (0, 10]", self.outer_lr)
        check(0.0 <= self.momentum < 1.0, "momentum", "lie in [0, 1)", self.momentum)
        check(0.0 <= self.alpha < 1.0, "alpha", "lie in [0, 1)", self.alpha)

    def begin_owner(self, owner: Memory, values: torch.Tensor) -> None:
        """Takes the parameters at the beginning as the first anchor."""
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
        """Continues with the anchor, mixed with a rank's own parameters; with its own alone where it was lost.

        What arrives takes more of the anchor the less of it does, so that ranks are drawn to it as much on average.
        """
        if not self.alpha:
            return torch.where(arrived, received, own)
        share = max(rank.arrived, 1.0 - self.alpha)
        return torch.where(arrived, own.lerp(received, (1.0 - self.alpha) / share), own)


@dataclass(frozen=True, kw_only=True)
class StreamingDiLoCo(DiLoCo):
    """DiLoCo in fragments of the model that take turns, each sent while ranks go on computing.

    A fragment is exchanged every `every` steps, and used `delay` steps later, mixed with what a rank has learned
    meanwhile. A lost part of a fragment leaves a rank with its own parameters there until the fragment's next turn.
    """

    name: ClassVar[str] = "streaming-diloco"

    fragments: int = 8
    """Parts of the model that are exchanged in turn."""
    delay: int = 1
    """Steps for which a fragment may travel while ranks compute."""
    outer_lr: float = 0.4
    """Learning rate of the outer optimizer: less than that of DiLoCo, as what is exchanged is a step old."""
    alpha: float = 0.5
    """Part of a rank's own parameters in what it continues with."""

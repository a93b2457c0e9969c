"""Gossip (NoLoCo): random pairwise averaging, without any collective among all ranks."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from stormtorch.checks import check
from stormtorch.policies.memory import NO_MEMORY, Memory
from stormtorch.policies.rank_policy import RankPolicy


@dataclass(frozen=True, kw_only=True)
class Gossip(RankPolicy):
    """Each rank exchanges its model with a random partner every `every` steps.

    Each rank has its own anchor and outer momentum. Its outer gradient is the mean of its parameters and its partner's,
    minus its anchor; if the partner's are lost, its own parameters alone. A slow rank delays only its partner of one
    exchange. `outer_lr=1.0, momentum=0.0` is plain pairwise averaging.
    """

    name: ClassVar[str] = "gossip"

    every: int = 50
    """Optimizer steps between two exchanges."""
    outer_lr: float = 0.7
    """Learning rate of the outer step."""
    momentum: float = 0.5
    """Momentum of the outer step, by Nesterov's rule."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check(0.0 < self.outer_lr <= 10.0, "outer_lr", "lie in (0, 10]", self.outer_lr)
        check(0.0 <= self.momentum < 1.0, "momentum", "lie in [0, 1)", self.momentum)

    def partners(self, ranks: int, random: torch.Generator) -> list[int]:
        """Draws pairs; with an odd number of ranks, one has no partner."""
        drawn: list[int] = torch.randperm(ranks, generator=random).tolist()
        found = list(range(ranks))
        for one, other in zip(drawn[0::2], drawn[1::2], strict=False):
            found[one], found[other] = other, one
        return found

    def begin_rank(self, rank: Memory, values: torch.Tensor) -> None:
        """Takes the initial parameters as the anchor."""
        rank["anchor"] = values
        rank["speed"] = torch.zeros_like(values)

    def accept(
        self, own: torch.Tensor, received: torch.Tensor, arrived: torch.Tensor, rank: Memory = NO_MEMORY
    ) -> torch.Tensor:
        """Makes an outer step towards the mean of the pair."""
        change = torch.where(arrived, (own + received) / 2, own) - rank["anchor"]
        speed = rank["speed"].mul_(self.momentum).add_(change)
        return rank["anchor"].add_(change.add_(speed, alpha=self.momentum), alpha=self.outer_lr)

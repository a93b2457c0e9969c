"""MIFA: federated averaging with absent ranks, whose latest updates still count, so that absence causes no bias."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from stormtorch.checks import check
from stormtorch.policies import rules
from stormtorch.policies.memory import NO_MEMORY, Memory
from stormtorch.policies.policy import Numbers
from stormtorch.policies.rank_policy import RankPolicy


@dataclass(frozen=True, kw_only=True)
class MIFA(RankPolicy):
    """Federated averaging with a memory of each rank's latest update.

    In every exchange the model moves by the mean of the latest updates of all ranks, also of those that made no step.
    Memories are kept where they arise: a rank sends the difference of its update to the one that owners know, and
    stores as known the chunks that they acknowledge.
    """

    name: ClassVar[str] = "mifa"
    known: ClassVar[tuple[str, str] | None] = ("told", "mean")
    by_steps: ClassVar[bool] = False
    every: int = 10
    """Steps between two exchanges."""
    at_least: int = 0
    """Steps that a rank must have made to take part. One that made none adds nothing, and gets the new model."""
    outer_lr: float = 1.0
    """Factor of the mean update."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check(0.0 < self.outer_lr <= 10.0, "outer_lr", "lie in (0, 10]", self.outer_lr)

    def begin_owner(self, owner: Memory, values: torch.Tensor) -> None:
        """Begins with the parameters, and without any update."""
        owner["parameters"] = values
        owner["mean"] = torch.zeros_like(values)

    def begin_rank(self, rank: Memory, values: torch.Tensor) -> None:
        """Begins at the parameters, with no update that owners know."""
        rank["start"] = values
        rank["told"] = torch.zeros_like(values)

    def send(self, own: torch.Tensor, loss: Numbers, rank: Memory = NO_MEMORY) -> torch.Tensor:
        """Sends by how much this update differs from the last one that owners know; nothing without a step."""
        return own - rank["start"] - rank["told"] if rank.steps else torch.zeros_like(own)

    def sent(self, rank: Memory, sent: torch.Tensor, arrived: torch.Tensor) -> None:
        """Remembers what owners know."""
        rank["told"].add_(sent.masked_fill(~arrived, 0.0))

    def combine(self, mean: torch.Tensor, count: Numbers, present: int) -> torch.Tensor:
        """Divides the sum of differences by the number of all ranks."""
        return mean.mul_(rules.share_of_all(count, present))

    def update(self, owner: Memory, combined: torch.Tensor) -> torch.Tensor:
        """Moves the parameters by the mean of all ranks' latest updates."""
        return owner["parameters"].add_(owner["mean"].add_(combined), alpha=self.outer_lr)

    def accept(
        self, own: torch.Tensor, received: torch.Tensor, arrived: torch.Tensor, rank: Memory = NO_MEMORY
    ) -> torch.Tensor:
        """Continues with the new parameters, or with its own where they were lost, and remembers where it started."""
        rank["start"] = torch.where(arrived, received, own)
        return rank["start"]

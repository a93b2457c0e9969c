"""AREA: asynchronous averaging of ranks of any speed, whose latest models have equal weight."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from stormtorch.policies import rules
from stormtorch.policies.memory import NO_MEMORY, Memory
from stormtorch.policies.policy import Numbers
from stormtorch.policies.rank_policy import RankPolicy


@dataclass(frozen=True, kw_only=True)
class AREA(RankPolicy):
    """Asynchronous training whose memory cancels uneven participation.

    A rank sends the difference between its model and the one that it sent last, and owners add it to the mean. So the
    mean is always that of the latest models of all ranks; a plain mean of arrivals would favour the data of fast ranks.
    A rank counts as sent only the chunks that owners acknowledge, so the next difference contains what was lost.
    """

    name: ClassVar[str] = "area"
    known: ClassVar[tuple[str, str] | None] = ("told", "mean")
    by_steps: ClassVar[bool] = False
    every: int = 10
    """Steps that a rank makes before it reports."""
    pace: Literal["together", "fastest"] = "fastest"
    """When an exchange begins; "fastest" waits for no other rank."""
    at_least: int = 10
    """Steps that a rank must have made to take part; the others go on."""

    def begin_owner(self, owner: Memory, values: torch.Tensor) -> None:
        """Takes the initial parameters, which all ranks share, as the mean."""
        owner["mean"] = values

    def begin_rank(self, rank: Memory, values: torch.Tensor) -> None:
        """Stores the initial parameters as sent: owners have them in their mean."""
        rank["told"] = values

    def send(self, own: torch.Tensor, loss: Numbers, rank: Memory = NO_MEMORY) -> torch.Tensor:
        """Sends the difference to the owners' last known model of this rank."""
        return own - rank["told"]

    def sent(self, rank: Memory, sent: torch.Tensor, arrived: torch.Tensor) -> None:
        """Stores the acknowledged chunks as sent."""
        rank["told"].add_(sent.masked_fill(~arrived, 0.0))

    def combine(self, mean: torch.Tensor, count: Numbers, present: int) -> torch.Tensor:
        """Divides the sum of differences by the number of all ranks: a rank that sent nothing contributes zero."""
        return mean.mul_(rules.share_of_all(count, present))

    def update(self, owner: Memory, combined: torch.Tensor) -> torch.Tensor:
        """Moves the mean by the differences."""
        return owner["mean"].add_(combined)

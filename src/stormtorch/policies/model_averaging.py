"""ModelAveraging (RPS): local SGD with lossy averaging of the models, block by block."""

from dataclasses import dataclass

import torch

from stormtorch.policies import rules
from stormtorch.policies.rank_policy import RankPolicy


@dataclass(frozen=True, kw_only=True)
class ModelAveraging(RankPolicy):
    """RPS: every rank trains a model of its own with its own optimizer.

    Every `every` steps, ranks average their models block by block: each block has an owner, which averages the copies
    that arrive. If the average is lost, a rank keeps its own block.
    """

    def order(self, ranks: int, random: torch.Generator) -> list[int]:
        """Draws new owners for every exchange, so that no block depends on one rank's links."""
        return rules.block_order(ranks, random)

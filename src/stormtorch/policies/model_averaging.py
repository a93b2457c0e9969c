"""RPS: models are averaged over what arrives, and every rank goes on with its own where the average is lost."""

from dataclasses import dataclass

import torch

from stormtorch.policies import rules
from stormtorch.policies.policy import RankPolicy


@dataclass(frozen=True, kw_only=True)
class ModelAveraging(RankPolicy):
    """RPS: every rank trains a model of its own with its own optimizer. Every so often, models are averaged block by
    block over the copies that arrive at a block's rank; where the average is lost, a rank keeps its own block.
    """

    def order(self, ranks: int, random: torch.Generator) -> list[int]:
        """Blocks change hands in every round, so that none depends on one rank's links."""
        return rules.block_order(ranks, random)

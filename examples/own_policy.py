"""A custom policy in one file: elastic averaging. It runs on real ranks and on virtual workers alike.

stormtorch simulate --workers 16 --policy lead,examples/own_policy.py:Elastic
stormtorch train lm --policy lead,examples/own_policy.py:Elastic
"""

from dataclasses import dataclass

import torch

import stormtorch


@dataclass(frozen=True, kw_only=True)
class Elastic(stormtorch.RankPolicy):
    """Every rank trains its own model, which is pulled towards a slowly moving centre."""

    every: int = 4
    """Steps between two exchanges."""
    pull: float = 0.5
    """Part of the way to the centre that a rank goes."""
    inertia: float = 0.5
    """How much of the old centre is in the new one."""

    def update(self, owner, combined):
        """The centre, which its owner stores between exchanges."""
        centre = owner.setdefault("centre", combined.clone())
        return centre.lerp_(combined, 1.0 - self.inertia)

    def accept(self, own, received, arrived):
        """If the centre is lost, a rank goes on with its own model."""
        return torch.where(arrived, own.lerp(received, self.pull), own)

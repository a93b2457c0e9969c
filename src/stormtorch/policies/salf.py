"""SALF: at the deadline of a step, what a slow rank has computed of its gradients counts, layer by layer, unbiased."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from stormtorch.policies.policy import Numbers, OwnerPolicy


@dataclass(frozen=True, kw_only=True)
class SALF(OwnerPolicy):
    """Layer-wise training with stragglers: backward ends at a deadline, wherever a rank is.

    Gradients are computed from the last layer backwards. At the deadline each rank sends those that it has, so that
    owners of late layers average over all ranks and owners of early layers over few. A layer that nobody has reached
    makes no step. As that happens by chance, steps of a layer that was reached are made longer by the inverse of the
    chance that somebody reaches it: then all layers move as far on average as without stragglers.
    """

    name: ClassVar[str] = "salf"
    deadline: Literal["auto"] | None = "auto"
    """When a rank's backward is cut off; see `OwnerPolicy`. Virtual workers have stragglers instead."""

    def combine(self, mean: torch.Tensor, count: Numbers, present: int) -> torch.Tensor:
        """Divides the mean by the chance that a layer is reached by anybody, estimated from how many reached it."""
        share = count / present
        missed = (1.0 - share) ** present if isinstance(share, torch.Tensor) else (1.0 - min(share, 1.0)) ** present
        return mean / (1.0 - missed)

"""SALF: at the deadline of a step, what a slow rank has computed of its gradients counts, layer by layer, unbiased."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from stormtorch.checks import check
from stormtorch.policies.bounded_drift import BoundedDrift
from stormtorch.policies.memory import NO_MEMORY, Memory
from stormtorch.policies.policy import Deadline, Numbers


@dataclass(frozen=True, kw_only=True)
class SALF(BoundedDrift):
    """Layer-wise training with stragglers: backward ends at a deadline, wherever a rank is.

    Gradients are computed from the last layer backwards. At the deadline each rank gives those that it has, so that
    owners of late layers average over all ranks and owners of early layers over few. A layer that nobody has reached
    gets a gradient of zero. As that happens by chance, gradients of a layer that was reached are made longer by the
    inverse of the chance that anybody reaches it: then all layers move as far on average as without stragglers. What
    owners send has the lead of `BoundedDrift`.

    On real ranks, gradients that come after the deadline count in the next step, weighed by how often they come.
    """

    name: ClassVar[str] = "salf"
    deadline: Deadline = "auto"
    """When a rank's backward is cut off; see `OwnerPolicy`. Virtual workers with a `SlowBackward` need seconds here;
    on other networks nobody is late, but for `Stragglers`."""
    inertia: float = 0.98
    """How much of what an owner remembers of how many ranks reach a layer stays at each step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.weights == "mean", "weights", 'be "mean": layers are weighed by how many reach them', self.weights)
        check(0.0 <= self.inertia < 1.0, "inertia", "lie in [0, 1)", self.inertia)

    def combine(self, mean: torch.Tensor, count: Numbers, present: int, owner: Memory = NO_MEMORY) -> torch.Tensor:
        """Divides the mean by the chance that anybody reaches a layer, from how many ranks have reached it lately."""
        share = torch.zeros_like(mean) + count / present
        reach = owner.setdefault("reach", torch.zeros_like(mean)).lerp_(share, 1.0 - self.inertia)
        weight = owner.setdefault("weight", torch.zeros_like(mean)).lerp_(torch.ones_like(mean), 1.0 - self.inertia)
        missed = (1.0 - (reach / weight).clamp_(max=1.0)) ** present
        # A layer that is hardly ever reached would be moved far too far by a single rank.
        return mean / (1.0 - missed.clamp_(max=0.9))

"""SALF: straggler-aware training: at a deadline, layers that a slow rank has computed count, without bias."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from stormtorch.checks import check
from stormtorch.policies.bounded_drift import BoundedDrift
from stormtorch.policies.memory import NO_MEMORY, Memory
from stormtorch.policies.policy import Deadline, Numbers


@dataclass(frozen=True, kw_only=True)
class SALF(BoundedDrift):
    """Layer-wise training with stragglers: backward is cut off at a deadline.

    Gradients are computed from the last layer backwards. At the deadline each rank contributes those that it has, so
    owners of late layers average over all ranks and owners of early layers over few. A layer that no rank has reached
    gets a gradient of zero. To correct this bias, the gradient of a reached layer is divided by the probability that
    any rank reaches it: on average, all layers then move as far as without stragglers. Owners send parameters with the
    lead of `BoundedDrift`.

    On real ranks, gradients that arrive after the deadline count in the next step, weighed by their frequency.
    """

    name: ClassVar[str] = "salf"
    deadline: Deadline = "auto"
    """When a rank's backward is cut off; see `OwnerPolicy`. Virtual workers with a `SlowBackward` need seconds here;
    on other networks no rank is late, except under `Stragglers`."""
    inertia: float = 0.98
    """Decay per step of an owner's moving average of how many ranks reach a layer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.weights == "mean", "weights", 'be "mean": layers are weighed by how many reach them', self.weights)
        check(0.0 <= self.inertia < 1.0, "inertia", "lie in [0, 1)", self.inertia)

    def combine(self, mean: torch.Tensor, count: Numbers, present: int, owner: Memory = NO_MEMORY) -> torch.Tensor:
        """Divides the mean by the estimated probability that any rank reaches the layer."""
        share = torch.zeros_like(mean) + count / present
        reach = owner.setdefault("reach", torch.zeros_like(mean)).lerp_(share, 1.0 - self.inertia)
        weight = owner.setdefault("weight", torch.zeros_like(mean)).lerp_(torch.ones_like(mean), 1.0 - self.inertia)
        missed = (1.0 - (reach / weight).clamp_(max=1.0)) ** present
        # Bounded: otherwise a single rank would move a rarely reached layer too far.
        return mean / (1.0 - missed.clamp_(max=0.9))

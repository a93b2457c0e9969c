"""The two-stage protocol with a lead: gradients to their owners, parameters back, nothing sent twice, drift bounded."""

from dataclasses import dataclass
from typing import Literal

import torch

from stormtorch.policies import rules
from stormtorch.policies.policy import Numbers, OwnerPolicy, check


@dataclass(frozen=True, kw_only=True)
class BoundedDrift(OwnerPolicy):
    """Each rank owns a shard of the parameters: it averages what arrived of that shard's gradient, runs the optimizer
    on it and sends the new parameters to everyone. Where those are lost, a replica keeps its stale copy until the next
    arrival, so that replicas differ by a bounded amount.
    """

    lead: float = 1.0
    """How far ahead of their own owners send parameters, in multiples of p/(1-p) updates, by which replicas lag on
    average (less where `max_lag` is set); p is the measured loss of the broadcast. 0 (or False) sends no lead."""
    weights: Literal["mean", "horvitz-thompson"] = "mean"
    """How gradients that arrived are weighed: their mean, in which the owner's own counts for more where others are
    lost; or each by the inverse of its link's chance to arrive, right also where ranks' data or links differ, at the
    cost of more noise and of one copy of the gradients."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check(0.0 <= self.lead <= 10.0, "lead", "lie in [0, 10]", self.lead)
        check(self.weights in ("mean", "horvitz-thompson"), "weights", 'be "mean" or "horvitz-thompson"', self.weights)

    @property
    def weighs(self) -> bool:
        """Whether gradients are weighed by the inverse of their chance to arrive."""
        return self.weights == "horvitz-thompson" and not self.up.exact

    def send(self, own: torch.Tensor, loss: Numbers) -> torch.Tensor:
        """A rank's gradients, times the inverse of their chance to arrive where they are weighed by it."""
        return own * rules.chance_weight(loss) if self.weighs else own

    def combine(self, mean: torch.Tensor, count: Numbers, present: int) -> torch.Tensor:
        """The mean of what arrived; of weighed gradients the sum over all ranks, in which what is lost is zero."""
        return mean.mul_(rules.share_of_all(count, present)) if self.weighs else mean

    def ahead(self, loss: float) -> float:
        """The lead that makes replicas right on average."""
        return rules.lead_for(self.lead, loss, self.max_lag)

"""The two-stage protocol with a lead: gradients go to owners, parameters come back, nothing is sent twice."""

from dataclasses import dataclass
from typing import Literal

import torch

from stormtorch.checks import check
from stormtorch.policies import rules
from stormtorch.policies.policy import Numbers, OwnerPolicy
from stormtorch.reliability import Reliability


@dataclass(frozen=True, kw_only=True)
class BoundedDrift(OwnerPolicy):
    """Two-stage policy with a bound on drift.

    Each rank owns a shard of the parameters: it averages what arrived of that shard's gradient, runs the optimizer on
    it and sends the new parameters to everyone. Where those are lost, a replica keeps its stale copy until the next
    arrival, so that replicas differ by a bounded amount.
    """

    lead: float = 1.0
    """How far ahead of its own parameters an owner sends them, as a multiple of the updates by which replicas lag on
    average. At a measured loss p of the broadcast they lag p/(1-p) updates, less where `max_lag` is set. 0 (or False)
    sends no lead."""
    weights: Literal["mean", "horvitz-thompson"] = "mean"
    """How gradients that arrived are weighed. "mean" is their mean, in which the owner's own counts for more where
    others are lost. "horvitz-thompson" divides each by its link's chance to arrive, which is unbiased also where ranks
    have different data or links, and costs more noise and one copy of the gradients."""
    redundancy: float | Literal["auto"] = 0.0
    """Parity chunks sent with each data chunk, in those stages that send nothing again: what is lost comes back as long
    as enough of both arrive. "auto" sends the least that leaves a loss of 5 % at the measured loss of a rank's links,
    within what a narrow `wire` pays for: all bytes together are at most 0.55 of those of float32, which itself gets
    none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check(0.0 <= self.lead <= 10.0, "lead", "lie in [0, 10]", self.lead)
        check(self.weights in ("mean", "horvitz-thompson"), "weights", 'be "mean" or "horvitz-thompson"', self.weights)
        if self.redundancy:
            lossy = max(self.up.budget, self.down.budget)
            check(lossy == 1.0, "redundancy", "be 0 where all that is lost is sent again", self.redundancy)
            Reliability(budget=1.0, redundancy=self.redundancy)  # refuses what is no redundancy

    @property
    def weighs(self) -> bool:
        """Whether gradients are weighed by the inverse of their chance to arrive."""
        return self.weights == "horvitz-thompson" and not self.up.exact

    def send(self, own: torch.Tensor, loss: Numbers) -> torch.Tensor:
        """Returns a rank's gradients, divided by their chance to arrive if `weights` says so."""
        return own * rules.inverse_probability_weight(loss) if self.weighs else own

    def combine(self, mean: torch.Tensor, count: Numbers, present: int) -> torch.Tensor:
        """Returns the mean of what arrived; for weighed gradients the mean over all ranks, where what is lost is 0."""
        return mean.mul_(rules.share_of_all(count, present)) if self.weighs else mean

    def ahead(self, loss: float) -> float:
        """Returns the lead that makes replicas unbiased at this loss."""
        return rules.lead_for(self.lead, loss, self.max_lag)

    def protect(self, loss: float, chunks: int, compression_ratio: float) -> float:
        """Returns `redundancy`, or what "auto" finds for this loss."""
        return rules.parity_for(loss, chunks, compression_ratio) if self.redundancy == "auto" else self.redundancy

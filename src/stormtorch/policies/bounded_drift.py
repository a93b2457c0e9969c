"""BoundedDrift, the default policy: lossy reduce-scatter of gradients, lossy broadcast of extrapolated parameters."""

from dataclasses import dataclass
from typing import Literal

import torch

from stormtorch.checks import check
from stormtorch.exchange.reliability import Reliability
from stormtorch.policies import rules
from stormtorch.policies.policy import Numbers, OwnerPolicy


@dataclass(frozen=True, kw_only=True)
class BoundedDrift(OwnerPolicy):
    """Two-stage policy with a bound on drift.

    Each rank owns a shard of the parameters: it averages the gradients of that shard that arrived, runs the optimizer
    and broadcasts the new parameters. Where they are lost, a replica keeps its stale copy until the next arrival, so
    that the drift between replicas is bounded. Nothing is retransmitted by default.
    """

    lead: float = 1.0
    """How far an owner extrapolates the parameters that it sends, as a multiple of the mean lag of replicas. At a
    measured loss p of the broadcast, the mean lag is p/(1-p) updates, less with `max_lag`. 0 (or False) disables it."""
    weights: Literal["mean", "horvitz-thompson"] = "mean"
    """Weights of the gradients that arrived. "mean" is their plain mean, in which the owner's own counts for more if
    others are lost. "horvitz-thompson" divides each by its link's arrival probability: unbiased even if ranks have
    different data or links, at the cost of more noise and one copy of the gradients."""
    redundancy: float | Literal["auto"] = 0.0
    """Forward error correction: parity chunks per data chunk, in stages without retransmission. Lost chunks are decoded
    if enough of both arrive. "auto" sends the least parity that leaves a loss of 5 % at the measured loss of a rank's
    links, within the bytes that a narrow `wire` saves: the total is at most 0.55 of float32, which itself gets none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check(0.0 <= self.lead <= 10.0, "lead", "lie in [0, 10]", self.lead)
        check(self.weights in ("mean", "horvitz-thompson"), "weights", 'be "mean" or "horvitz-thompson"', self.weights)
        if self.redundancy:
            lossy = max(self.up.budget, self.down.budget)
            check(lossy == 1.0, "redundancy", "be 0 if both stages retransmit what is lost", self.redundancy)
            Reliability(budget=1.0, redundancy=self.redundancy)  # raises for an invalid redundancy

    @property
    def weighs(self) -> bool:
        """Whether gradients are weighted by the inverse of their arrival probability."""
        return self.weights == "horvitz-thompson" and not self.up.exact

    def send(self, own: torch.Tensor, loss: Numbers) -> torch.Tensor:
        """Returns a rank's gradients, divided by their arrival probability under "horvitz-thompson"."""
        return own * rules.inverse_probability_weight(loss) if self.weighs else own

    def combine(self, mean: torch.Tensor, count: Numbers, present: int) -> torch.Tensor:
        """Returns the mean of what arrived; for weighted gradients the mean over all ranks, with lost ones as 0."""
        return mean.mul_(rules.share_of_all(count, present)) if self.weighs else mean

    def ahead(self, loss: float) -> float:
        """Returns the lead at which replicas are unbiased under this loss."""
        return rules.lead_for(self.lead, loss, self.max_lag)

    def protect(self, loss: float, chunks: int, compression_ratio: float) -> float:
        """Returns `redundancy`, or the automatic choice for this loss."""
        return rules.parity_for(loss, chunks, compression_ratio) if self.redundancy == "auto" else self.redundancy

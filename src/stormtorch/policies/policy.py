"""What `prepare` is told: which policy, with which settings. Valid from birth."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from stormtorch.reliability import LOSSY, Reliability

WIRES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)
"""What gradients and parameters may travel as."""


@dataclass(frozen=True, kw_only=True)
class BoundedDrift:
    """Each rank owns a shard of the parameters: it averages what arrived of that shard's gradient, runs the optimizer
    on it and sends the new parameters to everyone. Where those are lost, a replica keeps its stale copy until the next
    arrival, so that replicas differ by a bounded amount.
    """

    gradients: Reliability = LOSSY
    """Of stage 1, gradients to their owner. The default never sends anything twice: what arrived is averaged."""
    broadcast: Reliability = LOSSY
    """Of stage 2, parameters to everyone. A budget below 1 repairs until at most that fraction is missing, or until
    the deadline."""
    lead: float = 1.0
    """Owners send parameters ahead of their own by this times p/(1-p) updates, p the measured loss of the broadcast:
    by how much replicas lag on average (less, where `max_lag` is set). 0 (or False) is the protocol without a lead."""
    weights: Literal["mean", "horvitz-thompson"] = "mean"
    """How gradients that arrived are weighed: their mean, in which the owner's own counts for more where others are
    lost; or each by the inverse of its link's chance to arrive, right also where ranks' data or links differ, at the
    cost of more noise and of one copy of the gradients."""
    max_lag: int | None = None
    """No copy is ever more steps old than this: one that would be is fetched exactly. None sets no bound."""
    wire: torch.dtype = torch.float32
    """What travels: bfloat16 halves the bytes, int8 quarters them. Owners keep float32 all the same."""
    ownership: Literal["auto", "elements", "parameters"] = "auto"
    """Whether shards may cut through a parameter. Optimizers that look at single elements allow it; others, such as
    Muon, need whole parameters. "auto" knows torch's own, and gives an optimizer it does not know whole ones."""
    bucket_mb: float = 8.0
    """Gradients travel in buckets of this size, each as soon as it is complete. Smaller ones start earlier and cost
    more exchanges."""
    overlap: bool = False
    """Whether `step` returns while parameters arrive, so that they travel during the next forward: each module then
    waits for its own before it runs. Code that reads parameters elsewhere, as a moving average does, would read some
    that are still on their way, and must do so under `exact(model)`."""
    guard: float | None = 0.5
    """While the measured loss of the broadcast is above this anywhere, or a copy is older than `max_lag`, the broadcast
    is exact. None never does that."""
    settings: Literal["same", "rank 0", "any"] = "same"
    """What becomes of the optimizer's settings (learning rate, weight decay, betas, ...) where they differ between
    ranks, at `prepare` or at any step: an error that names them; or rank 0's are set on all ranks, before the step that
    would use others; or each rank uses its own."""
    warn_every: int = 100
    """Steps between two warnings about a rank that is missing."""
    give_up_s: float = 600.0
    """A rank missing for longer ends the job with an error that names it."""
    collective_wait_s: float = 600.0
    """A call that all ranks must make, such as `model.state_dict()`, raises an error when it has waited for so long for
    a rank that neither makes it nor waits for the others elsewhere."""
    drift_samples: int = 256
    """Numbers of the parameters that all ranks compare at every step, to measure the drift."""

    def __post_init__(self) -> None:
        _check_wire(self.wire)
        _check_bucket(self.bucket_mb)
        _check(0.0 <= self.lead <= 10.0, "lead", "lie in [0, 10]", self.lead)
        _check(self.weights in ("mean", "horvitz-thompson"), "weights", 'be "mean" or "horvitz-thompson"', self.weights)
        _check(
            self.ownership in ("auto", "elements", "parameters"),
            "ownership",
            'be "auto", "elements" or "parameters"',
            self.ownership,
        )
        _check(self.settings in ("same", "rank 0", "any"), "settings", 'be "same", "rank 0" or "any"', self.settings)
        _check(self.max_lag is None or self.max_lag >= 1, "max_lag", "be at least 1 or None", self.max_lag)
        _check(self.guard is None or 0.0 < self.guard < 1.0, "guard", "lie in (0, 1) or be None", self.guard)
        _check(self.warn_every >= 1, "warn_every", "be at least 1", self.warn_every)
        _check(self.give_up_s > 0.0, "give_up_s", "be above 0", self.give_up_s)
        _check_wait(self.collective_wait_s)
        _check(self.drift_samples >= 0, "drift_samples", "not be negative", self.drift_samples)


@dataclass(frozen=True, kw_only=True)
class ModelAveraging:
    """RPS: every rank trains a model of its own with its own optimizer. Every so often, models are averaged block by
    block over the copies that arrive at a block's rank; where the average is lost, a rank keeps its own block.
    """

    every: int = 1
    """Optimizer steps between two averagings."""
    reliability: Reliability = LOSSY
    """Of both directions."""
    bucket_mb: float = 8.0
    """Parameters travel in buckets of this size."""
    seed: int = 0
    """Of which rank averages which block, drawn anew every round; the same on all ranks."""
    overlap: bool = False
    """As of `BoundedDrift`."""
    collective_wait_s: float = 600.0
    """As of `BoundedDrift`."""

    def __post_init__(self) -> None:
        _check(self.every >= 1, "every", "be at least 1", self.every)
        _check_wait(self.collective_wait_s)
        _check_bucket(self.bucket_mb)


@dataclass(frozen=True, kw_only=True)
class GradientAveraging:
    """For comparison only: gradients are averaged lossily in both directions, and every rank applies what it got.

    Replicas differ by every gradient that any of them lost, for ever: they drift apart without bound.
    """

    reliability: Reliability = LOSSY
    """Of both directions."""
    bucket_mb: float = 8.0
    """Gradients travel in buckets of this size."""

    def __post_init__(self) -> None:
        _check_bucket(self.bucket_mb)


Policy: TypeAlias = BoundedDrift | ModelAveraging | GradientAveraging


def _check(right: bool, knob: str, demand: str, got: object) -> None:
    if not right:
        raise ValueError(f"{knob} must {demand}, got {got!r}")


def _check_wire(wire: torch.dtype) -> None:
    _check(wire in WIRES, "wire", f"be one of {', '.join(map(str, WIRES))}", wire)


def _check_wait(collective_wait_s: float) -> None:
    _check(collective_wait_s > 0.0, "collective_wait_s", "be above 0", collective_wait_s)


def _check_bucket(bucket_mb: float) -> None:
    _check(bucket_mb > 0.0, "bucket_mb", "be above 0", bucket_mb)

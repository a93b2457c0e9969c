"""Lossy averaging of gradients, for comparison: what happens where nothing holds replicas together."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from stormtorch.policies.policy import RankPolicy


@dataclass(frozen=True, kw_only=True)
class GradientAveraging(RankPolicy):
    """For comparison only: gradients are averaged lossily in both directions, and every rank applies what it got.

    Replicas differ by every gradient that any of them lost, for ever: they drift apart without bound.
    """

    sends: ClassVar[Literal["gradients", "parameters"]] = "gradients"

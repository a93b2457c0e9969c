"""Lossy averaging of gradients, for comparison: shows what happens where nothing holds replicas together."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from stormtorch.policies.rank_policy import RankPolicy


@dataclass(frozen=True, kw_only=True)
class GradientAveraging(RankPolicy):
    """Lossy averaging of gradients, for comparison only: every rank applies whatever average it got.

    Both directions are lossy. A gradient that one replica lost makes it differ from the others forever, so replicas
    drift apart without bound.
    """

    sends: ClassVar[Literal["gradients", "parameters"]] = "gradients"

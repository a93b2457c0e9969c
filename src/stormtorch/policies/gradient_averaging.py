"""Lossy gradient averaging, a baseline: shows how replicas diverge if nothing bounds their drift."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from stormtorch.policies.rank_policy import RankPolicy


@dataclass(frozen=True, kw_only=True)
class GradientAveraging(RankPolicy):
    """Lossy gradient averaging, for comparison only: every rank applies the average that it received.

    Both directions are lossy. A replica that loses a gradient differs from the others forever, so drift is unbounded.
    """

    sends: ClassVar[Literal["gradients", "parameters"]] = "gradients"

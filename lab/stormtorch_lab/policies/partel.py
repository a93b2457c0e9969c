"""PARTEL: each rank owns as much of the parameters as its line and its processor carry."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from stormtorch.policies.bounded_drift import BoundedDrift


@dataclass(frozen=True, kw_only=True)
class PARTEL(BoundedDrift):
    """Partitioned training: `BoundedDrift` whose blocks of parameters are as large as their owners are fast.

    The sizes are those for which a step is shortest, given what was measured of each rank's line, up and down, and of
    its processor; see `stormtorch.theory.ShardTimes`. They follow what is measured. Where all ranks are alike, so are
    the blocks, and the policy is `BoundedDrift`.
    """

    name: ClassVar[str] = "partel"
    shards: Literal["equal", "rate"] = "rate"
    """How much each rank owns: by what it carries, or the same."""

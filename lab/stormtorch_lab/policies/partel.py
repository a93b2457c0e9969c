"""PARTEL: shards in proportion to the measured link rates and processors of their owners."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from stormtorch.policies.bounded_drift import BoundedDrift


@dataclass(frozen=True, kw_only=True)
class PARTEL(BoundedDrift):
    """Partitioned training: `BoundedDrift` with larger shards for faster owners.

    The sizes are those for which a step is shortest, given the measured rates of each rank's link, up and down, and of
    its processor; see `stormtorch.theory.ShardTimes`. They follow the measurements. If all ranks are alike, the
    shards are equal, and the policy is `BoundedDrift`.
    """

    name: ClassVar[str] = "partel"
    shards: Literal["equal", "rate"] = "rate"
    """Size of each rank's shard: by its measured speed, or equal."""

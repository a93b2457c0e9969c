"""What ranks exchange and what they make of what arrives: one file per policy, plain tensors, no network."""

from stormtorch.policies.adel import ADEL
from stormtorch.policies.area import AREA
from stormtorch.policies.bounded_drift import BoundedDrift
from stormtorch.policies.diloco import DiLoCo, StreamingDiLoCo
from stormtorch.policies.gossip import Gossip
from stormtorch.policies.gradient_averaging import GradientAveraging
from stormtorch.policies.mifa import MIFA
from stormtorch.policies.model_averaging import ModelAveraging
from stormtorch.policies.partel import PARTEL
from stormtorch.policies.policy import OwnerPolicy, Policy
from stormtorch.policies.qsdp import QSDP
from stormtorch.policies.rank_policy import RankPolicy
from stormtorch.policies.salf import SALF
from stormtorch.policies.sparse_diloco import SparseDiLoCo

__all__ = [
    "ADEL",
    "AREA",
    "MIFA",
    "PARTEL",
    "QSDP",
    "SALF",
    "BoundedDrift",
    "DiLoCo",
    "Gossip",
    "GradientAveraging",
    "ModelAveraging",
    "OwnerPolicy",
    "Policy",
    "RankPolicy",
    "SparseDiLoCo",
    "StreamingDiLoCo",
]

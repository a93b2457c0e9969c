"""What ranks exchange and what they make of what arrives: one file per policy, plain tensors, no network."""

from stormtorch_lab.policies.adel import ADEL
from stormtorch_lab.policies.area import AREA
from stormtorch_lab.policies.mifa import MIFA
from stormtorch_lab.policies.partel import PARTEL
from stormtorch_lab.policies.qsdp import QSDP
from stormtorch_lab.policies.salf import SALF

from stormtorch.policies.bounded_drift import BoundedDrift
from stormtorch.policies.diloco import DiLoCo, StreamingDiLoCo
from stormtorch.policies.gossip import Gossip
from stormtorch.policies.gradient_averaging import GradientAveraging
from stormtorch.policies.model_averaging import ModelAveraging
from stormtorch.policies.policy import OwnerPolicy, Policy
from stormtorch.policies.rank_policy import RankPolicy
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

"""Synchronisation policies: how ranks exchange gradients and parameters, as arithmetic on plain tensors, one file each.

Called by the runtime on real ranks and by the simulator on virtual workers; independent of any network. Begin with
`policy.py`, then `bounded_drift.py`, the default.
"""

from stormtorch.policies.bounded_drift import BoundedDrift
from stormtorch.policies.diloco import DiLoCo, StreamingDiLoCo
from stormtorch.policies.gossip import Gossip
from stormtorch.policies.gradient_averaging import GradientAveraging
from stormtorch.policies.model_averaging import ModelAveraging
from stormtorch.policies.policy import OwnerPolicy, Policy
from stormtorch.policies.rank_policy import RankPolicy
from stormtorch.policies.sparse_diloco import SparseDiLoCo

__all__ = [
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

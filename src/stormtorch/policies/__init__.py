"""What ranks exchange and what they make of what arrives: one file per policy, plain tensors, no network."""

from stormtorch.policies.bounded_drift import BoundedDrift
from stormtorch.policies.gradient_averaging import GradientAveraging
from stormtorch.policies.model_averaging import ModelAveraging
from stormtorch.policies.policy import OwnerPolicy, Policy, RankPolicy
from stormtorch.policies.qsdp import QSDP

__all__ = ["QSDP", "BoundedDrift", "GradientAveraging", "ModelAveraging", "OwnerPolicy", "Policy", "RankPolicy"]

"""What ranks exchange and what they make of what arrives: one policy, one idea."""

from stormtorch.policies.policy import BoundedDrift, GradientAveraging, ModelAveraging

__all__ = ["BoundedDrift", "GradientAveraging", "ModelAveraging"]

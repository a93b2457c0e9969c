"""Differential privacy: what a training tells of a sample, gradients clipped sample by sample, and pairwise masks."""

from stormtorch.privacy.accountant import epsilon, noise_for
from stormtorch.privacy.per_sample import backward

__all__ = ["backward", "epsilon", "noise_for"]

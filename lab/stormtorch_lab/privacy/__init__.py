"""Differential privacy: what a training tells of a sample, gradients clipped sample by sample, and pairwise masks."""

from stormtorch_lab.privacy.accountant import epsilon, noise_for
from stormtorch_lab.privacy.per_sample import backward

__all__ = ["backward", "epsilon", "noise_for"]

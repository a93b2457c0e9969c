"""Differential privacy on plain tensors: the accountant, clipping sample by sample, noise, and pairwise masks.

Used by the policies that need it, and by users.
"""

from stormtorch_lab.privacy.accountant import epsilon, noise_for
from stormtorch_lab.privacy.per_sample import backward

__all__ = ["backward", "epsilon", "noise_for"]

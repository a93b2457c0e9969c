"""Cryptographically random noise, and how ranks share it."""

from __future__ import annotations

import math
import os

import torch


def secret_generator(seed: int | None = None) -> torch.Generator:
    """Makes an unpredictable generator; with a seed, a reproducible one for tests and virtual workers."""
    random = torch.Generator(device="cpu")
    return random.manual_seed(int.from_bytes(os.urandom(8), "little", signed=True) if seed is None else seed)


def share_of_noise(noise: float, clip: float, batch: int, sharers: int) -> float:
    """Returns the standard deviation of the noise that each rank adds to its mean gradient.

    Args:
        noise: Noise multiplier that the sum of `sharers` ranks has.
        clip: Norm to which gradients of samples are clipped.
        batch: Samples in a rank's mean.
        sharers: Number of ranks that share the noise.
    """
    return noise * clip / (batch * math.sqrt(sharers)) if noise else 0.0


def noise_that_arrives(noise: float, arrived: int, sharers: int) -> float:
    """Returns the noise multiplier of a mean over the ranks that arrived, of those that share the noise; exact.

    The mean of k ranks has k times the samples of one, so one sample moves it by at most C/(k b). The ranks' noises,
    each of standard deviation s = noise C/(b sqrt(n)), leave s/sqrt(k) in it. Their ratio is noise sqrt(k/n): what is
    lost makes the noise of the mean larger, but the effect of a sample grows faster, and privacy becomes weaker.
    """
    return noise * math.sqrt(arrived / sharers)

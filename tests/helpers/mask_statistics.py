"""Shared by the tests of arrival masks: owners, and tolerances of loss rates."""

import math

import torch
from torch import Tensor

from stormtorch.network.loss import Bernoulli, GilbertElliott

CPU = torch.device("cpu")


def owners(*sizes: int) -> Tensor:
    """Worker i owns sizes[i] chunks."""
    return torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))


def within(value: float, expected: float, deviation: float) -> bool:
    return abs(value - expected) <= 5.0 * deviation


def memory(model: GilbertElliott) -> float:
    return 1.0 - model.p / ((1.0 - model.p) * model.burst) - 1.0 / model.burst


def deviation(model: GilbertElliott | Bernoulli, count: int) -> float:
    """Of the rate of `count` datagrams of one link."""
    kept = memory(model) if isinstance(model, GilbertElliott) else 0.0
    return math.sqrt(model.p * (1.0 - model.p) / count * (1.0 + kept) / (1.0 - kept))

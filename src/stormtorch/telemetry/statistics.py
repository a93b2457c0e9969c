"""Statistics of measured values."""

import math
from collections.abc import Sequence


def mean(values: Sequence[float]) -> float:
    """Mean of one or more values; inf or NaN if any is."""
    return sum(values) / len(values)


def median(values: Sequence[float]) -> float:
    """Middle value, or the mean of the two middle values."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def percentile(values: Sequence[float], percent: float) -> float:
    """Smallest value that `percent` of all do not exceed; among few values, a high percentile is the largest one."""
    ordered = sorted(values)
    return ordered[max(math.ceil(len(ordered) * percent / 100), 1) - 1]


def spread(values: Sequence[float]) -> float:
    """Standard deviation of two or more values, estimated from this sample."""
    centre = mean(values)
    return math.sqrt(sum((each - centre) ** 2 for each in values) / (len(values) - 1))

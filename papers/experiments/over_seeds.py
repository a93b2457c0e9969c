"""Figures from runs that are kept: one for each seed, their mean, and its error."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from stormtorch.telemetry.statistics import mean


def seeds(runs: dict[str, dict[str, Any]], prefix: str) -> list[dict[str, Any]]:
    """The results whose keys are `prefix` and a seed."""
    return [run["result"] for key, run in sorted(runs.items()) if key.rpartition("/")[0] == prefix]


def above(runs: dict[str, dict[str, Any]], prefix: str, base: str) -> list[float]:
    """Percent by which perplexity is above that of the same seed under `base`; inf where it diverged.

    It is NaN where `base` diverged.
    """
    bases = {run["seed"]: run for run in seeds(runs, base)}
    pairs = [(run, bases[run["seed"]]) for run in seeds(runs, prefix) if run["seed"] in bases]
    return [_above(run["val_loss"], other["val_loss"]) for run, other in pairs]


def _above(loss: float | None, base: float | None) -> float:
    if base is None:
        return math.nan
    return math.inf if loss is None or loss - base > 700 else 100 * math.expm1(loss - base)


def mean_text(values: Sequence[float], form: str = "+.2f") -> str:
    """The mean and its standard error."""
    if not values:
        return "-"
    average, error = mean(values), standard_error(values)
    return f"{average:{form}} ± {error:{form.lstrip('+')}}" if len(values) > 1 else f"{average:{form}}"


def mean_and_bar(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and the error bar of a picture: two standard errors."""
    return mean(values), 2 * standard_error(values)


def standard_error(values: Sequence[float]) -> float:
    """Standard error of the mean; NaN where a value is not finite."""
    if not all(math.isfinite(value) for value in values):
        return math.nan
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def explain(axis: Any, **options: Any) -> None:
    """A legend; or, in a panel of which nothing was run, that."""
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False, **options)
    else:
        axis.text(0.5, 0.5, "not run yet", transform=axis.transAxes, ha="center", color="#868e96")

"""Checks that name the setting they refuse, so that a command line can name its option."""

import math
from collections.abc import Sequence


class BadSetting(ValueError):
    """A setting has no sensible value. `name` is the setting, `problem` what is wrong with it."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name} {problem}")
        self.name = name
        self.problem = problem


def check_between(name: str, value: float, low: float, high: float) -> None:
    """Raises `BadSetting` unless `value` lies in [low, high]."""
    if not (math.isfinite(value) and low <= value <= high):
        raise BadSetting(name, f"must lie in [{low:g}, {high:g}], got {value:g}")


def check_subset(name: str, values: Sequence[str], known: Sequence[str]) -> None:
    """Raises `BadSetting` unless `values` are some of `known`, each once."""
    if not values:
        raise BadSetting(name, f"must name at least one of {', '.join(known)}")
    for value in values:
        if value not in known:
            raise BadSetting(name, f"knows {', '.join(known)}, got {value!r}")
    if len(set(values)) != len(values):
        raise BadSetting(name, f"must name each only once, got {','.join(values)}")

"""Checks that name the setting they refuse, so that a command line can name its option."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from stormtorch.lab.conditions import BadCondition


class BadSetting(BadCondition):
    """A setting has no sensible value: `name` is the setting, `problem` what is wrong with it."""


@contextmanager
def blaming(name: str) -> Iterator[None]:
    """A `BadSetting` from within names this setting, the one that was turned, whatever it is called there."""
    try:
        yield
    except BadSetting as error:
        raise BadSetting(name, error.problem) from error


def check_between(name: str, value: float, low: float, high: float) -> None:
    """Raises `BadSetting` unless `value` lies in [low, high]."""
    if not (math.isfinite(value) and low <= value <= high):
        raise BadSetting(name, f"must lie in [{_text(low)}, {_text(high)}], got {_text(value)}")


def check_subset(name: str, values: Sequence[str], known: Sequence[str]) -> None:
    """Raises `BadSetting` unless `values` are some of `known`, each once."""
    if not values:
        raise BadSetting(name, f"must name at least one of {', '.join(known)}")
    for value in values:
        if value not in known:
            raise BadSetting(name, f"knows {', '.join(known)}, got {value!r}")
    if len(set(values)) != len(values):
        raise BadSetting(name, f"must name each only once, got {','.join(values)}")


def _text(value: float) -> str:
    return f"{value:d}" if isinstance(value, int) else f"{value:g}"

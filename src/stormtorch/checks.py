"""Checks of settings. Each error names the rejected setting, so that a command line can name its option."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class BadSetting(ValueError):
    """Raised for an invalid setting: `name` is the setting, `problem` what is wrong with it."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name} {problem}")
        self.name = name
        self.problem = problem


class BadCondition(BadSetting):
    """Raised for an invalid network condition."""


@contextmanager
def blaming(name: str, *instead_of: str) -> Iterator[None]:
    """Makes a `BadSetting` raised inside the block name the setting that the user chose.

    Args:
        name: The setting that the user chose.
        instead_of: Names that settings have inside the block and that `name` replaces; empty replaces every name.
    """
    try:
        yield
    except BadSetting as error:
        if instead_of and error.name not in instead_of:
            raise
        raise BadSetting(name, error.problem) from error


def check(right: bool, knob: str, demand: str, got: object) -> None:
    """Raises `BadSetting`, "`knob` must `demand`, got `got`", unless the value is right."""
    if not right:
        raise BadSetting(knob, f"must {demand}, got {got!r}")


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
            raise BadSetting(name, f"must be one of {', '.join(known)}, got {value!r}")
    if len(set(values)) != len(values):
        raise BadSetting(name, f"must name each only once, got {','.join(values)}")


def _text(value: float) -> str:
    return f"{value:d}" if isinstance(value, int) else f"{value:g}"


class CommandFailed(RuntimeError):
    """Ends a command with one message and exit code 1."""

    details = ""
    """Text that the command prints before the error message, such as the traceback of a failed rank."""

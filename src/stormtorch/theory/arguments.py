"""Checks of what formulas are asked for: a `ValueError` names the argument."""

import math


def check_loss(p: float) -> None:
    """A chance below 1: where everything is lost, nothing has a limit."""
    if not 0.0 <= p < 1.0:
        raise ValueError(f"p must lie in [0, 1), got {p:g}")


def check_count(name: str, value: int, least: int = 1) -> None:
    """A whole number, `least` or more."""
    if value != int(value) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value}")


def check_max_lag(max_lag: int | None) -> None:
    """None is no bound."""
    if max_lag is not None:
        check_count("max_lag", max_lag)


def check_size(name: str, value: float) -> None:
    """Finite and not negative."""
    if not (math.isfinite(value) and value >= 0.0):
        raise ValueError(f"{name} must be finite and not negative, got {value:g}")

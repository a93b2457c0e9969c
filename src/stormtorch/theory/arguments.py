"""Checks of the arguments of formulas. Each error is a `ValueError` that names the argument."""

import math

from stormtorch.checks import check


def check_loss(p: float) -> None:
    """Raises unless `p` is a probability below 1: if everything is lost, the formulas diverge."""
    check(0.0 <= p < 1.0, "p", "lie in [0, 1)", p)


def check_count(name: str, value: int, least: int = 1) -> None:
    """Raises unless `value` is a whole number of at least `least`."""
    check(value == int(value) and value >= least, name, f"be a whole number of at least {least}", value)


def check_max_lag(max_lag: int | None) -> None:
    """Raises unless `max_lag` is None (no bound) or a whole number of at least 1."""
    if max_lag is not None:
        check_count("max_lag", max_lag)


def check_size(name: str, value: float) -> None:
    """Raises unless `value` is finite and not negative."""
    check(math.isfinite(value) and value >= 0.0, name, "be finite and not negative", value)

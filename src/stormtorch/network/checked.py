"""Checks of network settings: each returns the value, or raises a ValueError that names the setting."""

import math
from collections.abc import Sequence
from numbers import Real

from stormtorch.network.units import parse_time

MAX_RANKS = 65_536
"""Number of possible ranks: a rank has 16 bits on the wire."""
LEAST_BURST_S, MOST_BURST_S = 1e-6, 3600.0
"""Range of the mean duration of a burst: shorter ones would be independent loss."""


def checked_number(name: str, value: object) -> float:
    """Convert a finite number to a float; a ValueError names any other value."""
    # NumPy's scalars are Real, too. A bool is an int in Python, but here it is a mistake.
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return float(value)


def checked_chance(name: str, value: object) -> float:
    """Convert a number in [0, 1] to a float; a ValueError names any other value."""
    number = checked_number(name, value)
    if not 0.0 <= number <= 1.0:
        percent = f"; {number:g} % is {number / 100:g}" if 1.0 < number <= 100.0 else ""
        raise ValueError(f"{name} must lie in [0, 1], got {number}{percent}")
    return number


def checked_burst(loss_name: str, loss: float, burst: object) -> float:
    """Convert a burst that is feasible with `loss` to a float; the rules are those of LinkFaults::validate in C++."""
    number = checked_number("burst", burst)
    if number < 1.0:
        raise ValueError(f"burst must be at least 1, got {number}")
    if number > 1.0 and loss == 1.0:
        raise ValueError(f"burst must be 1 when {loss_name} is 1 (a dead link has no bursts), got {number}")
    # The tolerance admits settings on the limit, such as 0.9 with a burst of 9, despite rounding.
    if number > 1.0 and loss / ((1.0 - loss) * number) > 1.0 + 1e-9:
        least = loss / (1.0 - loss)
        raise ValueError(f"burst {number} is too short for {loss_name} {loss}: it must be at least {least:.4g}, or 1")
    return number


def checked_burst_s(name: str, loss_name: str, loss: float, seconds: object) -> float:
    """Convert the mean duration of the bursts of a link with this loss to a float; a ValueError names what is wrong."""
    number = checked_number(name, seconds)
    if not LEAST_BURST_S <= number <= MOST_BURST_S:
        raise ValueError(f"{name} must lie in [1 us, 1 h] if bursts last some time, got {number:g} s")
    if not 0.0 < loss < 1.0:
        raise ValueError(f"{name} needs a {loss_name} above 0 and below 1 if bursts last some time, got {loss:g}")
    return number


def burst_seconds(burst: str) -> float:
    """Read the duration of a burst such as "5ms"; a ValueError names anything else."""
    try:
        return parse_time(burst)
    except ValueError as error:
        raise ValueError(f"burst must be a number of packets, or a time such as 5ms, got {burst!r}") from error


def checked_link(name: str, link: object) -> tuple[int, int]:
    """Return a pair of ranks; a ValueError names any other value."""
    match link:
        case (int(source), int(target)) if 0 <= source < MAX_RANKS and 0 <= target < MAX_RANKS:
            return source, target
    raise ValueError(f"{name} must have keys (source, target), two ranks in [0, {MAX_RANKS}), got {link!r}")


def checked_bits(bits: object) -> bytes:
    """Convert a trace of losses, as text or as integers, to bytes of value 0 and 1."""
    if isinstance(bits, str):
        values: Sequence[object] = [{"0": 0, "1": 1}.get(character, character) for character in bits]
    elif isinstance(bits, Sequence):
        values = bits
    else:
        raise ValueError(f"bits must be text, bytes or a sequence of 0 and 1, got {type(bits).__name__}")
    if not values:
        raise ValueError("bits must not be empty")
    for at, value in enumerate(values):
        # 1.0 and True equal 1, too, but only true integers are accepted.
        if not isinstance(value, int) or isinstance(value, bool) or value not in (0, 1):
            raise ValueError(f"bits must hold only 0 (arrived) and 1 (lost), got {value!r} at {at}")
    return bytes(value for value in values if isinstance(value, int))

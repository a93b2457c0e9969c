"""Rates, sizes and times as users write them: "400mbit", "64kb", "20ms", or numbers of bits/s, bytes and seconds.

Each error is a ValueError that begins with the name of the setting.
"""

import math
import re
from collections.abc import Mapping

_NUMBER = r"\s*([0-9]+(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?)\s*"
_RATE = re.compile(rf"^{_NUMBER}([kmg]?)(?:bit(?:/s)?|bps)\s*$", re.IGNORECASE)
_RATE_SCALE = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_SIZE = re.compile(rf"^{_NUMBER}([km]?)i?b\s*$", re.IGNORECASE)
# Powers of two, as tc reads them.
_SIZE_SCALE = {"": 1, "k": 1 << 10, "m": 1 << 20}
_TIME = re.compile(rf"^{_NUMBER}(us|µs|ms|s)\s*$", re.IGNORECASE)
_TIME_SCALE = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_rate(rate: object, name: str = "rate") -> float:
    """Convert a rate such as 400e6, "400mbit" or "1.5gbit" to bits per second."""
    bits = _parsed(name, rate, _RATE, _RATE_SCALE, "a rate such as 400mbit, or a number of bits per second")
    if not 0.0 < bits < 1e15:
        raise ValueError(f"{name} must be above 0 bits per second, got {rate!r}")
    return bits


def parse_size(size: object, name: str = "size") -> float:
    """Convert a size such as 524288, "512kb" or "1mb" to bytes."""
    return _parsed(name, size, _SIZE, _SIZE_SCALE, "a size such as 64kb, 1mb or 20000b, or a number of bytes")


def parse_time(time: object, name: str = "time") -> float:
    """Convert a time such as 0.02, "20ms" or "500us" to seconds."""
    return _parsed(name, time, _TIME, _TIME_SCALE, "a time such as 20ms, 500us or 0.1s, or a number of seconds")


def _parsed(name: str, given: object, pattern: re.Pattern[str], scale: Mapping[str, float], expected: str) -> float:
    value = given
    if isinstance(given, str) and (match := pattern.match(given)) is not None:
        value = float(match[1]) * scale[match[2].lower()]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        # A number without unit is for programs: text must have one.
        wanted = f"{expected.partition(', or ')[0]}, with its unit" if isinstance(given, str) else expected
        raise ValueError(f"{name} must be {wanted}, got {given!r}")
    return float(value)

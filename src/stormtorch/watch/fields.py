"""Validated access to fields of records. Records come from untrusted files and sockets: a value of the wrong type reads
as None, and the length of every text and list is bounded.
"""

import math
from typing import Any

_MOST_TEXT = 300
_MOST_RANKS = 4096
# Years 2017 to 2096, and at most a day ahead: other times would make every time axis useless.
_FIRST_TIME, _LAST_TIME = 1.5e9, 4e9
_DAY_S = 86_400.0


def number(record: dict[str, Any], name: str) -> float | None:
    """Returns a finite number, or None for anything else."""
    return as_number(record.get(name))


def as_number(value: object) -> float | None:
    """Returns a finite number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        known = float(value)
    except OverflowError:
        return None
    return known if math.isfinite(known) else None


def amount(record: dict[str, Any], name: str) -> float:
    """Returns a number that is not negative, or 0."""
    return max(0.0, number(record, name) or 0.0)


def count(record: dict[str, Any], name: str) -> int | None:
    """Returns a whole number from 0 on, or None."""
    value = number(record, name)
    return int(value) if value is not None and value >= 0 else None


def text(record: dict[str, Any], name: str) -> str:
    """Returns a text as one line of bounded length; empty for anything else."""
    value = record.get(name)
    return clean(value) if isinstance(value, str) else ""


def clean(value: str) -> str:
    """Removes control characters, which could move a terminal's cursor, and bounds the length."""
    cut = value[:_MOST_TEXT]
    shown = " ".join("".join(each if each.isprintable() else " " for each in cut).split())
    return shown + "…" * (len(value) > _MOST_TEXT)


def rank_of(value: object) -> int | None:
    """Returns a rank: a small whole number, or its text if it is a key of a JSON object."""
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 6:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MOST_RANKS:
        return None
    return value


def ranks(record: dict[str, Any], name: str) -> list[int]:
    """Returns a sorted list of ranks, without invalid ones."""
    value = record.get(name)
    if not isinstance(value, list):
        return []
    return sorted({rank for each in value[:_MOST_RANKS] if (rank := rank_of(each)) is not None})


def by_rank(record: dict[str, Any], name: str) -> dict[int, Any]:
    """Returns a mapping with ranks as keys, without invalid ones."""
    value = record.get(name)
    if not isinstance(value, dict) or len(value) > _MOST_RANKS:
        return {}
    return {rank: each for key, each in value.items() if (rank := rank_of(key)) is not None}


def mapping(record: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns a mapping, or an empty one."""
    value = record.get(name)
    return value if isinstance(value, dict) else {}


def time_of(record: dict[str, Any], now: float | None = None) -> float | None:
    """Returns the unix time of a record, or None if it is missing or implausible; `now` is when the record arrived."""
    value = number(record, "time")
    latest = _LAST_TIME if now is None else now + _DAY_S
    return value if value is not None and _FIRST_TIME <= value <= latest else None

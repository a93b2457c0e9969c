"""Progress of long work, for whoever shows it."""

from collections.abc import Callable

Advance = Callable[[str, int], None]
"""Function that is called with what is being done and how many steps of all are done."""


def ignore_progress(_what: str, _done: int) -> None:
    """Shows nothing."""

"""Callback for the progress of long operations."""

from collections.abc import Callable

Advance = Callable[[str, int], None]
"""Called with a description of the current step and the number of steps done."""


def ignore_progress(_what: str, _done: int) -> None:
    """Shows nothing."""

"""Collectives that an optimizer calls within its step are refused where each rank has another part of it.

They would mix what different ranks own, or never meet: ranks own different numbers of parameters.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from types import FrameType


class _Step(threading.local):
    frame: FrameType | None = None
    name = ""
    trial = False


_step = _Step()


class CalledWithinStep(RuntimeError):
    """An optimizer has called a collective within its step. Its second argument is the name of the collective."""


def begins(name: str, frame: FrameType) -> None:
    """Marks that an optimizer's step begins.

    Args:
        name: Name of the optimizer.
        frame: The call of the step. It has ended, perhaps by an exception, when it is no longer on the stack.
    """
    _step.frame, _step.name = frame, name


def ends() -> None:
    """Marks that the step has ended."""
    _step.frame = None


def on_stack(sought: FrameType, frame: FrameType | None) -> bool:
    """Returns whether a call is still under way, as seen from one that it may have led to."""
    while frame is not None and frame is not sought:
        frame = frame.f_back
    return frame is not None


@contextlib.contextmanager
def closure() -> Iterator[None]:
    """Enters a context in which the step calls its closure, a part of the program: it may call what it likes."""
    before, _step.frame = _step.frame, None
    try:
        yield
    finally:
        _step.frame = before


@contextlib.contextmanager
def trial() -> Iterator[None]:
    """Enters a context in which every collective of this thread is refused."""
    _step.trial = True
    try:
        yield
    finally:
        _step.trial = False


def check(what: str) -> None:
    """Raises an error if a collective is called within a step.

    Raises:
        CalledWithinStep: It is.
    """
    if _step.trial:
        raise CalledWithinStep("a trial is under way", what)
    if _step.frame is None:
        return
    if not on_stack(_step.frame, sys._getframe(1)):
        _step.frame = None
        return
    raise CalledWithinStep(
        f"storm: {_step.name} has called {what} within its step, but prepare() has given each rank other parameters: "
        "take the variant of the optimizer that is made for one process, or prepare it with "
        "policy=GradientAveraging(reliability=EXACT), under which every rank has the whole optimizer",
        what,
    )

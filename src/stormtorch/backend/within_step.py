"""Rejects collectives that an optimizer calls within its step if its states are sharded over the ranks.

Such a collective would mix shards of different owners, or deadlock: ranks own different numbers of parameters.
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
        frame: Frame of the step. The step has ended, perhaps by an exception, when it is no longer on the stack.
    """
    _step.frame, _step.name = frame, name


def ends() -> None:
    """Marks that the step has ended."""
    _step.frame = None


def on_stack(sought: FrameType, frame: FrameType | None) -> bool:
    """Whether the frame `sought` is still on the stack that ends in `frame`."""
    while frame is not None and frame is not sought:
        frame = frame.f_back
    return frame is not None


@contextlib.contextmanager
def closure() -> Iterator[None]:
    """Enters a context for the step's closure, which belongs to the program: it may call any collective."""
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
        "use the optimizer's variant for one process, or prepare it with "
        "policy=GradientAveraging(reliability=EXACT), under which every rank has the whole optimizer",
        what,
    )

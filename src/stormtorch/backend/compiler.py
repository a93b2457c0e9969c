"""Keeps torch.compile from looking into a process group: it must call its methods."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch


def keep_from_compiler(cls: type) -> None:
    """Hides the methods of a class from torch.compile."""
    for name, value in list(vars(cls).items()):
        if callable(value) and not name.startswith("__"):
            setattr(cls, name, _hidden(value))


def _hidden(method: Callable[..., Any]) -> Callable[..., Any]:
    guarded = torch._disable_dynamo(method)  # type: ignore[attr-defined]

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        # What torch offers for it imports the compiler, which takes seconds: only where that has happened anyway.
        return guarded(*args, **kwargs) if "torch._dynamo" in sys.modules else method(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # what torch.compile looks for
    return call

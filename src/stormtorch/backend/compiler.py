"""Keeps torch.compile from tracing into a process group, whose methods it must call as they are."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch


def keep_from_compiler(cls: type) -> None:
    """Hides the methods of a class from torch.compile."""
    for name, value in list(vars(cls).items()):
        if callable(value) and not name.startswith("__"):
            setattr(cls, name, hidden(value))


def hidden(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that torch.compile does not trace, but calls."""
    guarded = torch._disable_dynamo(method)  # type: ignore[attr-defined]

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        # torch's own wrapper imports the compiler, which takes seconds. Use it only if that has happened already.
        return guarded(*args, **kwargs) if "torch._dynamo" in sys.modules else method(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # the mark that torch.compile looks for
    return call

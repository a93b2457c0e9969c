"""Wrappers that exchange gradients themselves, such as DistributedDataParallel, are refused before and after prepare().

Wrapped after prepare(), a model would train wrongly and silently: DDP writes its mean into `parameter.grad`, which is
the memory of a bucket, while the engine still reads that memory to send it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

# By name, as importing FSDP takes a second and most jobs do without it.
_NAMES = ("DistributedDataParallel", "FullyShardedDataParallel")

_watching: RemovableHandle | None = None


def wrapper_of(module: nn.Module) -> str | None:
    """The name of the wrapper that a module is, if it is one."""
    return next((kind.__name__ for kind in type(module).__mro__ if kind.__name__ in _NAMES), None)


def refusal(name: str) -> ValueError:
    """The error for a wrapper around a model that is prepared, or is about to be."""
    return ValueError(
        f"prepare() takes the place of {name}: give prepare() the model itself, and do not wrap it afterwards either"
    )


def refuse_wrappers(prepared: Callable[[Iterable[nn.Parameter]], bool]) -> None:
    """From now on, making a wrapper around a prepared model raises an error.

    A wrapper registers the model as its submodule in its constructor, and torch lets us watch that.

    Args:
        prepared: Whether one of some parameters is prepared.
    """
    global _watching
    if _watching is not None:
        return

    def watch(parent: nn.Module, _name: str, child: nn.Module | None) -> None:
        name = wrapper_of(parent)
        if name is not None and child is not None and prepared(child.parameters()):
            raise refusal(name)

    _watching = register_module_module_registration_hook(watch)


def refuse_active_wrapper(model: nn.Module) -> None:
    """Raises an error in the forward of a model whose DDP was made first, and which prepare() was given without it."""
    active = DistributedDataParallel._active_ddp_module
    if active is not None and any(module is model for module in active.modules()):
        raise refusal("DistributedDataParallel")

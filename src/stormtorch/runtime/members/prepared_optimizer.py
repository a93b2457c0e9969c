"""The user's optimizer as `prepare` returns it: the same object, of a class derived from its own."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from stormtorch.backend.compiler import hidden
from stormtorch.runtime.members import distributed_checkpoint

# Attribute with the number of the step pre-hook that must run last.
_LAST = "_storm_last_hook"


class _Session(Protocol):
    """What a prepared optimizer needs of its session."""

    def zero_grad(self, set_to_none: bool) -> None: ...
    def wait(self) -> None: ...
    def moves(self, method: Callable[[], Any]) -> Any: ...
    def optimizer_state(self, local: dict[str, Any]) -> dict[str, Any]: ...
    def local_state(self, whole: dict[str, Any]) -> dict[str, Any]: ...


def _methods(kind: Any) -> dict[str, Any]:
    """Returns the methods that a prepared optimizer overrides, because they involve other ranks."""

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        """Clears the gradients of the model and of this rank's shard."""
        self.session.zero_grad(set_to_none)

    def state_dict(self: Any) -> Any:
        """Returns the state of the whole optimizer, in torch's format. One rank calls it, or all ranks do."""
        distributed_checkpoint.check_patched_before(sys._getframe(1))
        return self.session.optimizer_state(kind.state_dict(self))

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        """Loads the state of a whole optimizer, from a job of any size or from a plain optimizer."""
        kind.load_state_dict(self, self.session.local_state(state_dict))

    def register_step_pre_hook(self: Any, hook: Any) -> Any:
        """Registers a hook that is called before every step. Its changes to gradients take effect."""
        handle = kind.register_step_pre_hook(self, hook)
        last = self.__dict__.get(_LAST)
        if last is not None:
            self._optimizer_step_pre_hooks.move_to_end(last)
        return handle

    def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
        """Raises a RuntimeError: `prepare` has laid out all parameters in buckets."""
        if "session" in self.__dict__:
            raise RuntimeError("add_param_group after prepare(): give the optimizer all its parameters before")
        kind.add_param_group(self, param_group)

    @functools.wraps(kind.step)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return kind.step(self, *args, **kwargs)

    step: Any = hidden(call)  # it waits for other ranks, which torch.compile must not trace
    step.__wrapped__ = getattr(kind.step, "__wrapped__", kind.step)
    made = (zero_grad, state_dict, load_state_dict, register_step_pre_hook, add_param_group)
    modes = {name: _mode(kind, name) for name in ("train", "eval") if callable(getattr(kind, name, None))}
    return {**{each.__name__: each for each in made}, **modes, "step": step, "__module__": kind.__module__}


def _mode(kind: Any, name: str) -> Any:
    """Returns a method by which an optimizer switches parameters between training and evaluation values."""
    plain = getattr(kind, name)

    @functools.wraps(plain)
    def change(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Switches the mode. All ranks call it: each rank switches its own shard and receives the others."""
        return self.session.moves(lambda: plain(self, *args, **kwargs))

    return change


def settings(optimizer: Any) -> list[dict[str, Any]]:
    """Returns the plain settings of an optimizer's groups, where a mode would show."""
    return [
        {name: value for name, value in group.items() if isinstance(value, bool | int | str)}
        for group in optimizer.param_groups
    ]


def adopt(optimizer: torch.optim.Optimizer, session: _Session) -> None:
    """Makes an optimizer a prepared one: the same object, of a class derived from its own."""
    distributed_checkpoint.patch_torch()
    kind = type(optimizer)
    # No other base: Python allows the new class only if it differs by nothing but methods.
    optimizer.__class__ = types.new_class(
        kind.__name__, (kind,), exec_body=lambda names: names.update(_methods(kind), __doc__=kind.__doc__)
    )
    optimizer.__dict__["session"] = session


def plain_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the state dict of this rank's shard of a prepared optimizer."""
    kind: Any = type(optimizer).__base__
    found: dict[str, Any] = kind.state_dict(optimizer)
    return found


def keep_last(optimizer: torch.optim.Optimizer, hook: RemovableHandle) -> None:
    """Keeps a step pre-hook the last one when the program registers others."""
    optimizer.__dict__[_LAST] = hook.id


def trained(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Returns all parameters of an optimizer, in the order of its groups."""
    groups: Iterable[dict[str, Any]] = optimizer.param_groups
    return [parameter for group in groups for parameter in group["params"]]

"""The user's optimizer as `prepare` returns it: the same object, of a class derived from its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

# Attribute with the number of the hook that is called just before a step.
_LAST = "_storm_last_hook"


class _Session(Protocol):
    """What a prepared optimizer asks of its session."""

    def zero_grad(self, set_to_none: bool) -> None: ...
    def optimizer_state(self, local: dict[str, Any]) -> dict[str, Any]: ...
    def local_state(self, whole: dict[str, Any]) -> dict[str, Any]: ...


class Prepared:
    """Mixed into the class of a prepared optimizer: overrides the methods that involve other ranks."""

    session: _Session

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients of the model and of what this rank owns."""
        self.session.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the whole optimizer, in torch's format. One rank calls it, or all do."""
        return self.session.optimizer_state(super().state_dict())  # type: ignore[misc]  # of the user's class

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state of a whole optimizer, from a job of any size or from a plain optimizer."""
        super().load_state_dict(self.session.local_state(state_dict))  # type: ignore[misc]

    def register_step_pre_hook(self, hook: Any) -> Any:
        """Registers a hook that is called before every step. What it does to gradients counts."""
        handle = super().register_step_pre_hook(hook)  # type: ignore[misc]
        last = self.__dict__.get(_LAST)
        if last is not None:
            self._optimizer_step_pre_hooks.move_to_end(last)  # type: ignore[attr-defined]  # torch's
        return handle

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises a RuntimeError: parameters have their places in buckets since `prepare`."""
        if "session" in self.__dict__:
            raise RuntimeError("add_param_group after prepare(): give the optimizer all its parameters before")
        super().add_param_group(param_group)  # type: ignore[misc]


def adopt(optimizer: torch.optim.Optimizer, session: _Session) -> None:
    """Makes an optimizer a prepared one. It stays the same object, of a class derived from its own."""
    kind = type(optimizer)
    meta = type("Derived", (_Derived, type(kind)), {})
    optimizer.__class__ = meta(kind.__name__, (kind,), {"__module__": kind.__module__, "__doc__": kind.__doc__})
    optimizer.__dict__["session"] = session


class _Derived(type):
    """Mixes `Prepared` into classes by the order of methods alone.

    As a base of its own it would come before those without attributes, such as `ABC` and `Generic`, that a class has
    before `Optimizer`; then Python takes the layouts of objects of both classes for different ones.
    """

    def mro(cls) -> list[type]:
        return [cls, Prepared, *super().mro()[1:]]


def keep_last(optimizer: torch.optim.Optimizer, hook: RemovableHandle) -> None:
    """Has a hook that is called before steps stay the last one, also when the program adds others."""
    optimizer.__dict__[_LAST] = hook.id


def trained(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Returns all parameters of an optimizer, in the order of its groups."""
    groups: Iterable[dict[str, Any]] = optimizer.param_groups
    return [parameter for group in groups for parameter in group["params"]]

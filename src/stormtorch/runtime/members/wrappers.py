"""Rejects DistributedDataParallel, FSDP and other optimizers on a prepared model, which would train it wrongly.

DDP writes its mean into `parameter.grad`, which is the memory of a bucket that the engine still reads to send it. An
optimizer that prepare() did not get would use gradients that are averaged only where this rank owns them.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

# Class names, as importing FSDP takes a second and most jobs do not need it. fully_shard() changes a module's class.
_NAMES = {
    "DistributedDataParallel": "DistributedDataParallel",
    "FullyShardedDataParallel": "FullyShardedDataParallel",
    "FSDPModule": "fully_shard()",
}

_watching: RemovableHandle | None = None
_watching_steps: RemovableHandle | None = None
# Optimizers without prepared parameters, and the number of groups that each had when it was checked.
_others: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()


def wrapper_of(module: nn.Module) -> str | None:
    """Returns the wrapper's name, or None for a module that is no wrapper."""
    return next((_NAMES[kind.__name__] for kind in type(module).__mro__ if kind.__name__ in _NAMES), None)


def refuse_wrapped(model: nn.Module) -> None:
    """Raises an error if a model is a wrapper or contains one."""
    for module in model.modules():
        name = wrapper_of(module)
        if name is not None:
            raise refusal(name)


def refusal(name: str) -> ValueError:
    """Returns the error for a wrapper around a prepared model, before or after prepare()."""
    return ValueError(
        f"prepare() takes the place of {name}: give prepare() the model itself, and do not wrap it afterwards either."
    )


def refuse_wrappers(prepared: Callable[[Iterable[nn.Parameter]], bool]) -> None:
    """Makes wrapping a prepared model raise an error from now on.

    A wrapper registers the model as a submodule in its constructor, and torch has a hook for that.

    Args:
        prepared: Returns whether any of the given parameters is prepared.
    """
    global _watching
    if _watching is not None:
        return

    def watch(parent: nn.Module, _name: str, child: nn.Module | None) -> None:
        name = wrapper_of(parent)
        if name is not None and child is not None and prepared(child.parameters()):
            raise refusal(name)

    _watching = register_module_module_registration_hook(watch)


def refuse_other_optimizers(
    prepared: Callable[[Iterable[nn.Parameter]], bool], within: Callable[[FrameType], bool]
) -> None:
    """Makes a step raise an error if its optimizer has a prepared parameter but was not given to prepare().

    Args:
        prepared: Returns whether any of the given parameters is prepared, in a job that has not ended.
        within: Returns whether a call is part of a prepared optimizer's step, as when it wraps other optimizers.
    """
    global _watching_steps
    _others.clear()  # they may have parameters that are prepared now
    if _watching_steps is not None:
        return

    def watch(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        groups = optimizer.param_groups
        if "session" in optimizer.__dict__ or _others.get(optimizer) == len(groups):
            return
        if not prepared(parameter for group in groups for parameter in group["params"]):
            _others[optimizer] = len(groups)
        elif not within(sys._getframe(1)):
            raise RuntimeError(
                f"this {type(optimizer).__name__} has parameters that are prepared with another optimizer, which alone "
                "may step them: make the optimizer before prepare(model, optimizer), and step the one that it returns"
            )

    _watching_steps = register_optimizer_step_pre_hook(watch)


def refuse_active_wrapper(model: nn.Module) -> None:
    """Raises an error if the model's forward runs inside a DDP wrapper that was made before prepare()."""
    active = DistributedDataParallel._active_ddp_module
    if active is not None and any(module is model for module in active.modules()):
        raise refusal("DistributedDataParallel")


class PreparedParameters:
    """Checks that a model still has its prepared parameters: replacements would never be trained.

    Args:
        model: The user's model.
        parameters: Prepared parameters. Some may belong to another model.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self._model = model
        own = {id(parameter) for parameter in model.parameters()}
        self._numbers = {id(each): number for number, each in enumerate(parameters) if id(each) in own}
        # A search through all modules takes milliseconds, so it runs only if a parameter is not where it was found.
        self._places: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []

    def gone(self) -> list[int]:
        """Returns the numbers of parameters that the model lacks. Moving or renaming one is allowed."""
        if self._places and all(holder.get(name) is parameter for holder, name, parameter in self._places):
            return []
        places = {
            id(parameter): (module._parameters, name, parameter)
            for module in self._model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and id(parameter) in self._numbers
        }
        gone = [number for each, number in self._numbers.items() if each not in places]
        self._places = [] if gone else list(places.values())
        return gone

    def check(self) -> None:
        """Raises an error if a parameter is gone."""
        gone = self.gone()
        if gone:
            refuse_wrapped(self._model)
            raise RuntimeError(
                f"parameter {gone[0]} is prepared, and the model no longer has it: replace parameters and modules, as "
                "weight_norm() and distribute_module() do, before prepare()"
            )

"""Patch of torch.distributed.checkpoint for prepared optimizers. What a checkpoint holds is in `full_state.py`.

That module looks up the model's parameters in an optimizer's groups, where a prepared optimizer has shard pieces. The
patch gives it a wrapper with whole parameters. The module is slow to import, so it is patched only if the program has
imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import torch

_MODULE = "torch.distributed.checkpoint.state_dict"
_PATCHED = "_storm_taught"


class _WholeOptimizer:
    """A prepared optimizer with the model's parameters in its groups.

    Args:
        optimizer: The prepared optimizer.
        groups: Its groups with whole parameters.
        names: Names of the state of each parameter that is about to be loaded.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: list[dict[str, Any]],
        names: Mapping[torch.Tensor, Sequence[str]],
    ) -> None:
        self._optimizer = optimizer
        self.param_groups = groups
        # Never empty: the module steps an optimizer without state, to create some.
        self.state: dict[Any, Any] = {None: {}, **{each: dict.fromkeys(of) for each, of in names.items()}}

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the whole optimizer."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state of the whole optimizer."""
        self._optimizer.load_state_dict(state_dict)


def patch_torch() -> bool:
    """Patches torch's module, if it is imported, to see whole prepared optimizers. Returns whether it did so now."""
    module: Any = sys.modules.get(_MODULE)
    if module is None or hasattr(module, _PATCHED) or not hasattr(module, "_load_optim_state_dict"):
        return False
    setattr(module, _PATCHED, True)
    get, load = module._get_optim_state_dict, module._load_optim_state_dict

    def get_whole(model: Any, optimizers: Any, info: Any) -> Any:
        return get(model, tuple(_whole(each) for each in optimizers), info)

    def load_whole(model: Any, optimizers: Any, state_dict: Any, info: Any) -> Any:
        return load(model, tuple(_whole(each, state_dict, info) for each in optimizers), state_dict, info)

    module._get_optim_state_dict, module._load_optim_state_dict = get_whole, load_whole
    return True


def check_patched_before(frame: FrameType | None) -> None:
    """Raises a RuntimeError if torch's module has called a prepared optimizer before it was patched.

    Args:
        frame: Frame of the caller of `state_dict`.
    """
    if patch_torch() and frame is not None and frame.f_globals.get("__name__") == _MODULE:
        raise RuntimeError(
            "torch.distributed.checkpoint was imported after prepare() and not patched for prepared optimizers: import "
            f"{_MODULE} before prepare(), or call this again"
        )


def _whole(optimizer: Any, given: Any = None, info: Any = None) -> Any:
    session = vars(optimizer).get("session")
    groups = None if session is None else session.whole_groups()
    if groups is None:
        return optimizer
    names: dict[torch.Tensor, list[str]] = {}
    for each in (parameter for group in groups for parameter in group["params"]):
        firsts = [f"state.{name}." for name in (info.fqn_param_mapping.get(each, ()) if given else ())]
        names[each] = [key[len(first) :] for first in firsts for key in given if str(key).startswith(first)]
    return _WholeOptimizer(optimizer, groups, names)

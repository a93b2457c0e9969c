"""Personal parts of a model: parameters and buffers that are never exchanged, such as each rank's own head."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from stormtorch.policies.personal_parts import check_parts

# By identity and weakly: a new parameter at the address of a dead personal one must not become personal.
_parameters: Any = WeakIdKeyDictionary()
_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def declare(model: nn.Module, parts: Sequence[nn.Module | nn.Parameter], *, again: bool) -> None:
    """Makes parts of a model personal, with everything inside them.

    Args:
        model: The user's model.
        parts: Modules and parameters of it.
        again: Whether the model is prepared already, so that all parts that were not personal have been sent.

    Raises:
        TypeError: A part is neither a module nor a parameter.
        ValueError: A part is not the model's, or was declared too late.
    """
    check_parts(model, parts)
    for place, part in enumerate(parts):
        if again and not is_personal(part):
            raise ValueError(
                f"personal[{place}] comes too late, as it has been sent already: name all personal parts of a model in "
                "its first prepare()"
            )
        if isinstance(part, nn.Module):
            _modules.update(part.modules())
        for each in part.parameters() if isinstance(part, nn.Module) else [part]:
            _parameters[each] = True


def is_personal(part: nn.Module | torch.Tensor) -> bool:
    """Whether a module or a parameter is personal."""
    return part in _modules if isinstance(part, nn.Module) else part in _parameters


def personal_buffers(model: nn.Module) -> frozenset[str]:
    """Returns the names of the buffers in personal modules."""
    return frozenset(
        name
        for prefix, module in model.named_modules()
        if module in _modules
        for name, _ in module.named_buffers(prefix, recurse=False)
    )


def shared(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yields all parameters and buffers that are not personal."""
    yield from (each for each in model.parameters() if each not in _parameters)
    personal = personal_buffers(model)
    yield from (each for name, each in model.named_buffers() if name not in personal)


def names(model: nn.Module) -> list[str]:
    """Returns the names of all personal parameters and buffers."""
    parameters = [name for name, each in model.named_parameters() if each in _parameters]
    return parameters + sorted(personal_buffers(model))

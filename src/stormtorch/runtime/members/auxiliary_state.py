"""Auxiliary optimizer state: what an optimizer keeps outside `state`, such as a step count in an attribute.

Every value that the optimizer's own step changes belongs to its state, whatever its name, and a joining process loads
it from the other ranks. Values that only the program changes belong to the program.
"""

from __future__ import annotations

import logging
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn

from stormtorch.collectives.base.objects import pack, unpack

_MOST_BYTES = 1 << 20
_DEPTH = 6
# Attributes of `prepare` and torch, and what travels separately as settings and per-parameter state.
_OTHERS = frozenset({"param_groups", "state", "defaults", "session", "ledger"})
_NO_STATE = (
    *(nn.Module, logging.Logger, type, weakref.ref, types.ModuleType, types.FunctionType, types.MethodType),
    *(types.BuiltinFunctionType, torch.Generator),
)

Path = tuple[tuple[str, Any], ...]
"""Path from the optimizer to a value: attribute names, keys, and numbers of parameters that are keys."""


class AuxiliaryState:
    """The auxiliary state of one optimizer.

    Args:
        optimizer: The user's optimizer.
        parameters: All its parameters, as numbered in messages.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        self._optimizer = optimizer
        self._parameters = parameters
        self._before: dict[Path, Any] = {}
        self._few: list[Any] | None = None
        """All attributes, if they are only a few constants, as in torch's own optimizers."""
        self._changed: dict[Path, None] = {}

    def before_step(self) -> None:
        """Records the values before the optimizer steps."""
        self._few = self._constants()
        if self._few is None:
            self._before = {path: _mark(value) for path, value in self._values().items()}

    def after_step(self) -> None:
        """Finds the values that the step has changed."""
        few, self._few = self._few, None
        if few is not None:
            if few == self._constants():
                return
            self._before = {(("name", name),): _mark(value) for name, _, value in few}
        for path, value in self._values().items():
            if path not in self._before or self._before[path] != _mark(value):
                self._changed[path] = None
        self._before = {}

    def reported(self, *, whole: bool) -> torch.Tensor:
        """Returns the values that steps have changed, as a message; empty if there are none.

        Args:
            whole: Whether every rank has the whole optimizer, so that large tensors are the same on all ranks too.
        """
        known, sent, lacking = self._values(), [], []
        for path in self._changed:
            if path not in known:
                continue
            if _travels(known[path], whole=whole):
                sent.append([[list(each) for each in path], _copied(known[path], torch.device("cpu"))])
            else:
                lacking.append(_name(path))
        if not sent and not lacking:
            return torch.empty(0, dtype=torch.uint8)
        message = pack([sent, lacking])
        if not whole and message.numel() > _MOST_BYTES:
            message = pack([[], lacking + [_name(path) for path in self._changed if _name(path) not in lacking]])
        return message

    def take(self, message: torch.Tensor) -> list[str]:
        """Loads what another rank has reported. Returns the names of values that could not be sent or loaded."""
        if not message.numel():
            return []
        sent, lacking = unpack(message)
        lacking = [str(each) for each in lacking]
        for given, value in sent:
            path: Path = tuple((str(kind), key) for kind, key in given)
            self._changed[path] = None
            if not self._put(path, value):
                lacking.append(_name(path))
        return lacking

    def within_objects(self) -> dict[Path, Any]:
        """Returns copies of the values inside objects that the optimizer keeps.

        A copy of its attributes would share these objects.
        """
        return {path: _copied(each) for path, each in self._values().items() if _in_object(path)}

    def put(self, values: dict[Path, Any]) -> None:
        """Restores values that `within_objects` has returned."""
        for path, value in values.items():
            self._put(path, _copied(value))

    # --- finding values -----------------------------------------------------------------------------------------------

    def _constants(self) -> list[Any] | None:
        """Returns name, type and value of each attribute; None if one is no constant, or `state` has other keys."""
        found: list[Any] = []
        for name, value in vars(self._optimizer).items():
            if name in _OTHERS or name.startswith(("_optimizer_", "_storm_", "__")):
                continue
            if type(value) not in (bool, int, str):
                return None
            found.append((name, type(value), value))
        if any(not isinstance(key, torch.Tensor) for key in self._optimizer.state):
            return None
        return found

    def _values(self) -> dict[Path, Any]:
        found: dict[Path, Any] = {}
        seen = {id(self._optimizer)}
        numbers = {id(each): number for number, each in enumerate(self._parameters)}
        for name, value in list(vars(self._optimizer).items()):
            if name not in _OTHERS and not name.startswith(("_optimizer_", "_storm_", "__")):
                _walk(value, (("name", name),), seen, numbers, found)
        for key, value in list(cast(dict[Any, Any], self._optimizer.state).items()):
            if not isinstance(key, torch.Tensor):
                _walk(value, (("state", key),), seen, numbers, found)
        return found

    def _put(self, path: Path, value: Any) -> bool:
        """Sets a value. Returns False if its path does not exist."""
        holder: Any = self._optimizer
        if path[0][1] in _OTHERS or any(kind == "name" and str(key).startswith("__") for kind, key in path):
            return False
        for kind, key in path[:-1]:
            holder = self._get(holder, kind, key)
            if holder is None:
                return False
        kind, key = path[-1]
        before = self._get(holder, kind, key)
        value = _copied(value, before.device if isinstance(before, torch.Tensor) else self._device(value))
        try:
            if kind == "name":
                setattr(holder, key, value)
            elif kind == "state":
                holder.state[key] = value
            else:
                holder[self._parameters[key] if kind == "parameter" else key] = value
        except (AttributeError, IndexError, KeyError, TypeError):
            return False
        return True

    def _get(self, holder: Any, kind: str, key: Any) -> Any:
        try:
            if kind == "name":
                return getattr(holder, key, None)
            if kind == "state":
                return holder.state.get(key)
            return holder[self._parameters[key] if kind == "parameter" else key]
        except (AttributeError, IndexError, KeyError, TypeError):
            return None

    def _device(self, value: Any) -> torch.device:
        """Returns the device of a new tensor: main memory for single numbers, as for torch's own `step`."""
        small = not isinstance(value, torch.Tensor) or value.numel() <= 1
        return torch.device("cpu") if small or not self._parameters else self._parameters[0].device


def _walk(value: Any, path: Path, seen: set[int], numbers: dict[int, int], found: dict[Path, Any]) -> None:
    if _is_plain(value) or isinstance(value, set | deque | bytes | bytearray):
        found[path] = value
        return
    if id(value) in seen or len(path) > _DEPTH or not _has_values(value):
        return
    seen.add(id(value))
    for part, each in list(_parts(value, numbers)):
        _walk(each, (*path, part), seen, numbers, found)


def _has_values(value: Any) -> bool:
    if isinstance(value, (torch.Tensor, *_NO_STATE)):
        return False
    return not type(value).__module__.startswith("stormtorch")


def _parts(value: Any, numbers: dict[int, int]) -> Iterator[tuple[tuple[str, Any], Any]]:
    if isinstance(value, dict):
        for key, each in value.items():
            if isinstance(key, str | int):
                yield ("key", key), each
            elif id(key) in numbers:
                yield ("parameter", numbers[id(key)]), each
    elif isinstance(value, list | tuple):
        for place, each in enumerate(value):
            yield ("key", place), each
    else:
        for name, each in getattr(value, "__dict__", {}).items():
            yield ("name", name), each


def _is_plain(value: Any) -> bool:
    """Whether a value is a number, a string, a tensor that is no parameter, or lists and dictionaries of these."""
    if value is None or type(value) in (bool, int, float, complex, str):
        return True
    if isinstance(value, torch.Tensor):
        return not (isinstance(value, nn.Parameter) or value.requires_grad)
    if type(value) in (list, tuple):
        return all(_is_plain(each) for each in value)
    return type(value) is dict and all(type(key) in (str, int) and _is_plain(each) for key, each in value.items())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        each: Any
        inner: Iterable[Any] = value.values() if isinstance(value, dict) else value
        for each in inner:
            yield from _tensors(each)


def _travels(value: Any, *, whole: bool) -> bool:
    return _is_plain(value) and (whole or all(each.numel() <= 1 for each in _tensors(value)))


def _in_object(path: Path) -> bool:
    return any(kind == "name" for kind, _ in path[1:])


class _Tensor:
    """A tensor and its version, which counts in-place changes."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.version = tensor, tensor._version

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Tensor) and self.tensor is other.tensor and self.version == other.version

    __hash__ = None  # type: ignore[assignment]  # never hashed


def _mark(value: Any) -> Any:
    """Returns a snapshot that compares equal as long as the value has not changed."""
    if isinstance(value, torch.Tensor):
        return _Tensor(value)
    if isinstance(value, dict):
        return [(key, _mark(each)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return [_mark(each) for each in value]
    return type(value), repr(value)


def _copied(value: Any, device: torch.device | None = None) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to(device or value.device, copy=True)
    if isinstance(value, dict):
        return {key: _copied(each, device) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(each, device) for each in value)
    return value


def _name(path: Path) -> str:
    return ".".join(str(key) for _, key in path)

"""A helpful error for scripts written for DDP: a prepared model has no `model.module`, as nothing wraps it."""

import contextlib
import weakref
from typing import Any

from torch import nn

from stormtorch.runtime.session.session import sessions_of


class Unwrapped:
    """Mixed into the class of a prepared model: Python looks for `__getattr__` only in the class."""

    def __init_subclass__(cls, **_: Any) -> None:
        """Keeps the user's class from registering the derived class as one of its own."""

    def __getattr__(self, name: str) -> Any:
        if name != "module":
            return super().__getattr__(name)  # type: ignore[misc]  # nn.Module has it
        try:
            return super().__getattr__(name)  # type: ignore[misc]  # a submodule may have this name
        except AttributeError:
            if not sessions_of(self):  # type: ignore[arg-type]  # a copy is not prepared
                raise
            raise AttributeError(
                f"'{type(self).__name__}' object has no attribute 'module': stormtorch.prepare() wraps nothing, the "
                "model is itself. Use model where a script for DDP has model.module",
                name=name,
                obj=self,
            ) from None


# Derived classes by the class that they derive from. A derived class lives as long as a model has it.
_derived: weakref.WeakKeyDictionary[type, weakref.ref[type]] = weakref.WeakKeyDictionary()


def unwrap(model: nn.Module) -> None:
    """Makes a model explain that it is not wrapped. It stays the same object, of a class derived from its own."""
    kind = type(model)
    if isinstance(model, Unwrapped):
        return
    # A class may have a metaclass or a layout that refuses this. Then the error is torch's own.
    with contextlib.suppress(Exception):
        found = _derived.get(kind, lambda: None)()
        if found is None:
            names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
            found = type(kind.__name__, (Unwrapped, kind), names)
            _derived[kind] = weakref.ref(found)
        model.__class__ = found

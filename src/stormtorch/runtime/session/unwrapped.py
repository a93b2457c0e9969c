"""A helpful error for scripts for DDP that use `model.module`: a prepared model is not wrapped, so it has none."""

import contextlib
import weakref
from typing import Any

from torch import nn

from stormtorch.runtime.session.session import sessions_of


class Unwrapped:
    """Mixed into the class of a prepared model: Python looks for `__getattr__` only in the class."""

    def __init_subclass__(cls, **_: Any) -> None:
        """Prevents the user's class from registering the derived class as one of its subclasses."""

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


# Derived classes by base class. A derived class lives as long as a model uses it.
_derived: weakref.WeakKeyDictionary[type, weakref.ref[type]] = weakref.WeakKeyDictionary()


def unwrap(model: nn.Module) -> None:
    """Gives a model the helpful error. It stays the same object, but its class becomes one derived from its own."""
    kind = type(model)
    if isinstance(model, Unwrapped):
        return
    # Some metaclasses and layouts do not allow this. Then torch's own error remains.
    with contextlib.suppress(Exception):
        found = _derived.get(kind, lambda: None)()
        if found is None:
            names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
            found = type(kind.__name__, (Unwrapped, kind), names)
            _derived[kind] = weakref.ref(found)
        model.__class__ = found

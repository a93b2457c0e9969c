"""Registry of policies by name: all classes that set `name` in the files of a package."""

import functools
import importlib
import pkgutil

from stormtorch.policies.policy import Policy


@functools.cache
def named(package: str = "stormtorch.policies") -> dict[str, type[Policy]]:
    """Returns the policies of a package by their names."""
    found: dict[str, type[Policy]] = {}
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        for value in vars(importlib.import_module(f"{package}.{module.name}")).values():
            if isinstance(value, type) and issubclass(value, Policy) and value.__dict__.get("name"):
                found[value.name] = value
    return {name: found[name] for name in sorted(found)}

"""Checks of a policy's class definition: raises for anything that would be silently ignored."""

from __future__ import annotations

import difflib
import inspect
from dataclasses import fields
from typing import Any


def check_policy_class(policy: Any) -> None:
    """Raises for classes that would behave differently from how they read.

    Args:
        policy: A `Policy`. Classes whose own definition sets `is_base` are what policies derive from.

    Raises:
        TypeError: The class has fields or functions that no policy of its kind has.
    """
    kind = type(policy)
    name = kind.__name__
    bases = [each for each in kind.__mro__ if each.__dict__.get("is_base")]
    if len(bases) < 2:
        raise TypeError(f"{name} must derive from OwnerPolicy or RankPolicy")
    own = [each for each in kind.__mro__ if each not in bases and each is not object]
    known = {each.name for each in fields(policy)}
    ignored = [
        field
        for each in own
        if "__dataclass_fields__" not in each.__dict__
        for field, annotation in inspect.get_annotations(each).items()
        if "ClassVar" not in str(annotation)
    ]
    if ignored:
        raise TypeError(
            f"decorate {name} with @dataclass(frozen=True, kw_only=True): without it, {', '.join(ignored)} is ignored"
        )
    bare = [
        field
        for each in own
        for field in each.__dict__
        if field in known and field not in inspect.get_annotations(each)
    ]
    if bare:
        raise TypeError(f"write {bare[0]} in {name} with its type, as in `every: int = 4`: without it, it is ignored")
    _check_functions(kind, own, bases[0])


def _check_functions(kind: type[Any], own: list[type[Any]], base: type[Any]) -> None:
    """Raises for functions that are never called: misspelt ones, and those of the other kind of policy."""
    kinds: list[type[Any]] = base.__mro__[1].__subclasses__()
    siblings = [each for each in kinds if each is not base and each.__dict__.get("is_base")]
    for sibling in siblings:
        for function in set(sibling.functions) - set(base.functions):
            if any(function in each.__dict__ for each in own):
                article = "an" if base.__name__[0] in "AEIOU" else "a"
                raise TypeError(
                    f"{kind.__name__} is {article} {base.__name__}, which has no {function}: derive it from "
                    f"{sibling.__name__}, or remove that"
                )
    for each in own:
        for function, value in each.__dict__.items():
            near = difflib.get_close_matches(function, base.functions, n=1, cutoff=0.75)
            if callable(value) and near and function not in base.functions and not function.startswith("_"):
                raise TypeError(f"{kind.__name__}.{function} is never called: did you mean {near[0]}?")

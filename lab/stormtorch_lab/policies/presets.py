"""Policies by name, as commands take them: those of the library with their usual settings, or a class from a file."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stormtorch.checks import BadSetting
from stormtorch.exchange.reliability import EXACT, Reliability
from stormtorch.policies import BoundedDrift, GradientAveraging, ModelAveraging, policy, registry
from stormtorch.policies.policy import Policy

PRESETS = ("lossless", "plain", "lead", "model-averaging", "gradient-averaging")
"""Names of policies whose settings commands choose, from the most careful to the least."""
WIRES = {str(each).removeprefix("torch."): each for each in policy.WIRES}
"""Number formats that gradients and parameters may travel in, by name."""


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """Settings of policies that commands offer. A policy takes those that it has."""

    wire: str = "float32"
    """Number format on the network: a key of `WIRES`."""
    budget: float = 1.0
    """Fraction of each lossy message that may be missing; 1 never retransmits."""
    gradient_budget: float | None = None
    """Fraction of each message of gradients that may be missing; None is `budget`."""
    lead: float = 1.0
    """How far ahead "lead" sends parameters, in multiples of their mean lag p/(1-p)."""
    weights: Literal["mean", "horvitz-thompson"] = "mean"
    """How received gradients are weighed."""
    redundancy: float | Literal["auto"] = 0.0
    """Parity chunks for each data chunk in messages with a budget of 1; "auto" chooses by loss and wire."""
    max_lag: int | None = None
    """Largest age of a copy in steps before it is fetched exactly; None sets no bound."""
    guard: float | None = 0.5
    """Measured loss above which the broadcast becomes exact; None never does that."""
    every: int = 1
    """Steps between two averagings of models."""
    shards: Literal["equal", "rate"] = "equal"
    """Size of each rank's shard: equal, or by measured speed. Virtual workers have no speed."""
    more: tuple[tuple[str, str], ...] = ()
    """Other fields of policies and their values, as text. Policies that do not have a field ignore it."""
    given: frozenset[str] = frozenset()
    """Names of settings that the user gave. A class from a file keeps its own defaults for the others."""


def named() -> dict[str, type[Policy]]:
    """Returns the policies of both distributions by their names."""
    found = registry.named() | registry.named("stormtorch_lab.policies")
    return {name: found[name] for name in sorted(found)}


def names() -> tuple[str, ...]:
    """Returns the names of all policies of the library."""
    return (*PRESETS, *named())


def make_policy(name: str, settings: PolicySettings | None = None) -> Policy:
    """Makes the policy that a command names.

    Args:
        name: One of `names()`, or a class in a file: `my.py:MyPolicy`.
        settings: What the user chose. A class from a file gets those of its fields that the user gave, or that differ
            from their usual values.

    Raises:
        ValueError: There is no such policy, or the file, the class or a setting is not valid.
    """
    settings = settings or PolicySettings()
    if ":" in name or name.endswith(".py"):
        return _from_file(name, settings)
    if name in named():
        return _of_class(named()[name], name, settings)
    if settings.wire not in WIRES:
        raise ValueError(f"wire must be one of {', '.join(WIRES)}, got {settings.wire!r}")
    wire = WIRES[settings.wire]
    lossy = Reliability(budget=settings.budget)
    if name == "model-averaging":
        return ModelAveraging(every=settings.every, reliability=lossy, wire=wire)
    if name == "gradient-averaging":
        return GradientAveraging(reliability=lossy, wire=wire)
    if name == "lossless":
        return BoundedDrift(reliability=EXACT, wire=wire, shards=settings.shards)
    if name not in PRESETS:
        raise ValueError(
            f"policy must be one of {', '.join(names())}, or a class in a file as in my.py:MyPolicy, got {name!r}"
        )
    return BoundedDrift(
        reliability=lossy,
        gradients=None if settings.gradient_budget is None else Reliability(budget=settings.gradient_budget),
        lead=settings.lead if name == "lead" else 0.0,
        weights=settings.weights,
        redundancy=settings.redundancy,
        max_lag=settings.max_lag,
        guard=settings.guard,
        wire=wire,
        shards=settings.shards,
    )


def _from_file(name: str, settings: PolicySettings) -> Policy:
    path, _, class_name = name.rpartition(":")
    if not path or not class_name.isidentifier():
        raise ValueError(f"policy must name a class in a file, as in my.py:MyPolicy, got {name!r}")
    kind: object = getattr(_module(Path(path)), class_name, None)
    if kind is None:
        raise ValueError(f"policy: {path} has no class {class_name}{_of_these(path)}")
    if not (isinstance(kind, type) and issubclass(kind, Policy)):
        raise ValueError(f"policy: derive {class_name} in {path} from stormtorch.OwnerPolicy or stormtorch.RankPolicy")
    return _of_class(kind, f"{class_name}() in {path}", settings)


def _of_class(kind: type[Policy], described: str, settings: PolicySettings) -> Policy:
    """Makes a policy with those of its fields that the user gave, or that differ from their usual values."""
    usual = PolicySettings()
    chosen = {
        each.name: getattr(settings, each.name)
        for each in dataclasses.fields(usual)
        if each.name in settings.given or getattr(settings, each.name) != getattr(usual, each.name)
    }
    chosen.pop("given", None)
    fields = {each.name: each for each in dataclasses.fields(kind)}  # a subclass of a dataclass is one
    given = {knob: WIRES.get(value, value) if knob == "wire" else value for knob, value in chosen.items()}
    if "budget" in given and "budget" not in fields and "reliability" in fields:
        given["reliability"] = Reliability(budget=given.pop("budget"))
    for knob, text in given.pop("more", ()):
        if knob in fields:
            given[knob] = _read(knob, text, fields[knob].default)
    try:
        return kind(**{knob: value for knob, value in given.items() if knob in fields})
    except BadSetting as error:
        if hasattr(usual, error.name):
            raise
        # Commands have no option of that name, or one that means something else, as the delay of a network.
        problem = f"has {described}, whose {error.name} {error.problem}: --set {error.name}=VALUE sets it"
        raise BadSetting("policy", problem) from error
    except TypeError as error:
        raise ValueError(f"policy: {described} could not be made: {error}") from error


def _read(knob: str, text: str, default: Any) -> Any:
    """Reads a field's value as what its default is: of numbers and words, whichever the text is.

    Raises:
        ValueError: The text is no such value; the message names the field.
    """
    try:
        if isinstance(default, bool):
            return {"true": True, "false": False}[text.lower()]
        if isinstance(default, int | float):
            return type(default)(text)
        if isinstance(default, tuple):
            return tuple(float(each) for each in text.split(","))
    except (KeyError, ValueError) as error:
        words = {bool: "true or false", int: "a whole number", float: "a number"}
        raise ValueError(f"{knob} must be {words.get(type(default), 'numbers, as 1,0.5')}, got {text!r}") from error
    for kind in (int, float):  # a field whose default is None or a word may also have a number
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def _of_these(path: str) -> str:
    """Lists the policies of a file, for an error."""
    found = [
        name
        for name, value in vars(_module(Path(path))).items()
        if isinstance(value, type) and issubclass(value, Policy) and value.__module__.startswith("stormtorch_policy_")
    ]
    return f", only {', '.join(found)}" if found else ""


def _module(path: Path) -> object:
    """Imports the module in a file, once, so that a policy is the same class everywhere."""
    name = f"stormtorch_policy_{path.stem}_{abs(hash(path.resolve()))}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ValueError(f"policy: there is no Python file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ValueError(f"policy: {path} cannot be imported: {type(error).__name__}: {error}") from error
    return module

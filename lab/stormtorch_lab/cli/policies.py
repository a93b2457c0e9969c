"""Policies from command-line options: which policy takes which setting."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Literal

import typer

from stormtorch.checks import BadSetting

if TYPE_CHECKING:
    from stormtorch_lab.studies.settings import StudySettings


def given(command: typer.Context) -> frozenset[str]:
    """Names of the policy settings given on the command line, even if they equal the defaults."""
    from stormtorch_lab.policies.presets import PolicySettings

    sources = {each.name: command.get_parameter_source(each.name) for each in fields(PolicySettings)}
    return frozenset(name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE")


def fields_of(texts: list[str] | None, policies: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Parses `--set`: names and values of fields; at least one of the policies must have each.

    Raises:
        BadSetting: A text is not NAME=VALUE, or no policy has that field.
    """
    from stormtorch_lab.policies.presets import make_policy

    found = []
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise BadSetting("set", f"must be NAME=VALUE, got {text!r}")
        try:
            known = {field.name for policy in policies for field in fields(make_policy(policy))}
        except ValueError as error:
            raise BadSetting("policy", str(error).removeprefix("policy ")) from error
        if name not in known:
            raise BadSetting("set", f"names {name}, which no chosen policy has: they have {', '.join(sorted(known))}")
        found.append((name, value))
    return tuple(found)


def redundancy_of(text: str) -> float | Literal["auto"]:
    """Parses `--redundancy`: a number, or "auto".

    Raises:
        BadSetting: It is neither.
    """
    if text == "auto":
        return "auto"
    try:
        return float(text)
    except ValueError as error:
        raise BadSetting("redundancy", f"must be a number or auto, got {text!r}") from error


def check_taken(settings: StudySettings) -> None:
    """Raises `BadSetting` for a given setting that none of the policies takes."""
    from stormtorch_lab.policies.presets import PolicySettings, names

    usual = PolicySettings()
    for knob in (each.name for each in fields(usual) if each.name not in ("given", "more")):
        chosen = getattr(settings, knob)
        if chosen == getattr(usual, knob) or any(_takes(name, knob, chosen) for name in settings.policies):
            continue
        takers = [name for name in names() if _takes(name, knob, chosen)]
        has = ", ".join(settings.labels)
        raise BadSetting(knob, f"belongs to {', '.join(takers)}, and --policy has {has}")


def _takes(name: str, knob: str, value: Any) -> bool:
    """Whether the setting changes a policy. Two budgets are tried, as one may equal that of gradients."""
    from stormtorch_lab.policies.presets import PolicySettings, make_policy

    bases = (PolicySettings(), PolicySettings(budget=0.5))
    try:
        return any(make_policy(name, replace(base, **{knob: value})) != make_policy(name, base) for base in bases)
    except ValueError:
        return True  # it rejects the value, so it has the setting

"""Descriptions and digests of the arguments of `prepare`, to check that they agree on all ranks."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping

from torch import nn
from torch.optim import Optimizer

from stormtorch.policies.policy import Policy
from stormtorch.runtime.members.prepared_optimizer import trained
from stormtorch.runtime.memory import personal

Described = Mapping[str, str]
"""Description of each part of an argument, by name."""


def describe(model: nn.Module, optimizer: Optimizer, policy: Policy) -> dict[str, Described]:
    """Describes what must be the same on all ranks: personal parts, model, optimizer and policy."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = {}
    for number, each in enumerate(trained(optimizer)):
        # Personal parameters are never exchanged, so shapes may differ between ranks.
        kind = f"{str(each.dtype).removeprefix('torch.')} {list(each.shape)}{'' if each.requires_grad else ', frozen'}"
        parameters[f"{number}: {names.get(id(each), '')}"] = "personal" if personal.is_personal(each) else kind
    settings = {each.name: repr(getattr(policy, each.name)) for each in dataclasses.fields(policy) if each.repr}
    groups = {
        f"group {place}": f"{len(each['params'])} parameters" for place, each in enumerate(optimizer.param_groups)
    }
    return {
        "choice of personal parts": dict.fromkeys(personal.names(model), "personal"),
        "model": parameters,
        "optimizer": {"class": type(optimizer).__name__, **groups},
        "policy": {"class": type(policy).__name__, **settings},
    }


def digests(given: Mapping[str, Described]) -> list[int]:
    """Returns a digest of each description."""
    return [zlib.crc32(repr(dict(each)).encode()) for each in given.values()]


def difference(own: Described, other: Described) -> str:
    """Names the first part that differs: "guard is 0.5 and not None"."""
    for name in [*other, *own]:
        if own.get(name) != other.get(name):
            part = name.partition(": ")[2] or name
            return f"{part} is {own.get(name, 'missing')}, and {other.get(name, 'missing')} elsewhere"
    return "their parts are in another order"

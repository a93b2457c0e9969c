"""Distributed PyTorch training over networks that drop packets."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from stormtorch.errors import StormError
from stormtorch.exchange.options import Options
from stormtorch.exchange.reliability import EXACT, LOSSY, REPAIRED, Reliability
from stormtorch.network.faults import faults

if TYPE_CHECKING:
    from stormtorch.backend import use_as_default
    from stormtorch.backend.hooks.lossy import LossyGradients, lossy_hook, lossy_reduce_scatter
    from stormtorch.backend.hooks.quantised import quantise
    from stormtorch.collectives.joining import join
    from stormtorch.data.elastic_sampler import ElasticSampler
    from stormtorch.joining.etcd import EtcdStore
    from stormtorch.joining.rendezvous import connect
    from stormtorch.policies import (
        BoundedDrift,
        DiLoCo,
        Gossip,
        GradientAveraging,
        ModelAveraging,
        OwnerPolicy,
        Policy,
        RankPolicy,
        SparseDiLoCo,
        StreamingDiLoCo,
    )
    from stormtorch.runtime.memory.gradient_norms import clip_grad_norm_
    from stormtorch.runtime.prepare import exact, no_sync, prepare
    from stormtorch.runtime.rank.pruning import prune
    from stormtorch.telemetry.ledger import Ledger
    from stormtorch.udp.leaving import leave

__version__ = version("stormtorch")

# torch takes seconds to import, so names that need it are imported on first access.
_PLACES = {
    "BoundedDrift": "policies",
    "DiLoCo": "policies",
    "ElasticSampler": "data.elastic_sampler",
    "EtcdStore": "joining.etcd",
    "Gossip": "policies",
    "GradientAveraging": "policies",
    "Ledger": "telemetry.ledger",
    "LossyGradients": "backend.hooks.lossy",
    "ModelAveraging": "policies",
    "OwnerPolicy": "policies",
    "Policy": "policies",
    "RankPolicy": "policies",
    "SparseDiLoCo": "policies",
    "StreamingDiLoCo": "policies",
    "clip_grad_norm_": "runtime.memory.gradient_norms",
    "connect": "joining.rendezvous",
    "exact": "runtime.prepare",
    "join": "collectives.joining",
    "leave": "udp.leaving",
    "lossy_hook": "backend.hooks.lossy",
    "lossy_reduce_scatter": "backend.hooks.lossy",
    "no_sync": "runtime.prepare",
    "prepare": "runtime.prepare",
    "prune": "runtime.rank.pruning",
    "quantise": "backend.hooks.quantised",
    "use_as_default": "backend",
}

_LAB = {"ADEL", "AREA", "MIFA", "PARTEL", "QSDP", "SALF", "LightDp", "PrivateDrift", "simulate"}

__all__ = [
    "EXACT",
    "LOSSY",
    "REPAIRED",
    "BoundedDrift",
    "DiLoCo",
    "ElasticSampler",
    "EtcdStore",
    "Gossip",
    "GradientAveraging",
    "Ledger",
    "LossyGradients",
    "ModelAveraging",
    "Options",
    "OwnerPolicy",
    "Policy",
    "RankPolicy",
    "Reliability",
    "SparseDiLoCo",
    "StormError",
    "StreamingDiLoCo",
    "__version__",
    "clip_grad_norm_",
    "connect",
    "exact",
    "faults",
    "join",
    "leave",
    "lossy_hook",
    "lossy_reduce_scatter",
    "no_sync",
    "prepare",
    "prune",
    "quantise",
    "use_as_default",
]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(import_module(f"stormtorch.{_PLACES[name]}"), name)
    if name in _LAB:
        raise AttributeError(f"{name} is in the distribution stormtorch-lab: from stormtorch_lab import {name}")
    if name[:1].isupper():  # a policy that was added to the policies folder and is listed nowhere else
        from stormtorch.policies.registry import named

        for policy in named().values():
            if policy.__name__ == name:
                return policy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Distributed PyTorch training over networks that drop packets."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from stormtorch.errors import StormError
from stormtorch.network.faults import faults
from stormtorch.reliability import EXACT, LOSSY, REPAIRED, Reliability
from stormtorch.transport.options import Options

if TYPE_CHECKING:
    from stormtorch.backend import use_as_default
    from stormtorch.backend.lossy import LossyGradients, lossy_hook, lossy_reduce_scatter
    from stormtorch.backend.quantised import quantise
    from stormtorch.collectives.joining import join
    from stormtorch.policies import (
        QSDP,
        BoundedDrift,
        GradientAveraging,
        ModelAveraging,
        OwnerPolicy,
        Policy,
        RankPolicy,
    )
    from stormtorch.policies.ledger import Ledger
    from stormtorch.runtime.elastic_sampler import ElasticSampler
    from stormtorch.runtime.norms import clip_grad_norm_
    from stormtorch.runtime.prepare import exact, no_sync, prepare
    from stormtorch.simulation import simulate
    from stormtorch.transport.etcd import EtcdStore
    from stormtorch.transport.leaving import leave
    from stormtorch.transport.rendezvous import connect

__version__ = version("stormtorch")

# torch takes seconds to import, so what needs it is imported when it is first asked for.
_PLACES = {
    "BoundedDrift": "policies",
    "ElasticSampler": "runtime.elastic_sampler",
    "EtcdStore": "transport.etcd",
    "GradientAveraging": "policies",
    "Ledger": "policies.ledger",
    "LossyGradients": "backend.lossy",
    "ModelAveraging": "policies",
    "OwnerPolicy": "policies",
    "Policy": "policies",
    "QSDP": "policies",
    "RankPolicy": "policies",
    "clip_grad_norm_": "runtime.norms",
    "connect": "transport.rendezvous",
    "exact": "runtime.prepare",
    "join": "collectives.joining",
    "leave": "transport.leaving",
    "lossy_hook": "backend.lossy",
    "lossy_reduce_scatter": "backend.lossy",
    "no_sync": "runtime.prepare",
    "prepare": "runtime.prepare",
    "quantise": "backend.quantised",
    "simulate": "simulation",
    "use_as_default": "backend",
}

__all__ = [
    "EXACT",
    "LOSSY",
    "QSDP",
    "REPAIRED",
    "BoundedDrift",
    "ElasticSampler",
    "EtcdStore",
    "GradientAveraging",
    "Ledger",
    "LossyGradients",
    "ModelAveraging",
    "Options",
    "OwnerPolicy",
    "Policy",
    "RankPolicy",
    "Reliability",
    "StormError",
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
    "quantise",
    "simulate",
    "use_as_default",
]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(import_module(f"stormtorch.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

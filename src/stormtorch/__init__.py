"""Distributed PyTorch training over networks that drop packets."""

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from stormtorch.errors import StormError
from stormtorch.faults import faults
from stormtorch.options import Options
from stormtorch.reliability import EXACT, LOSSY, REPAIRED, Reliability

if TYPE_CHECKING:
    from stormtorch.backend import use_as_default
    from stormtorch.backend.lossy import LossyGradients, lossy_hook, lossy_reduce_scatter
    from stormtorch.policies import (
        BoundedDrift,
        GradientAveraging,
        Ledger,
        ModelAveraging,
        clip_grad_norm_,
        exact,
        no_sync,
        prepare,
    )
    from stormtorch.rendezvous import connect
    from stormtorch.simulation import simulate

__version__ = version("stormtorch")

_BACKEND = ("LossyGradients", "lossy_hook", "lossy_reduce_scatter")
_POLICIES = (
    *("BoundedDrift", "GradientAveraging", "Ledger", "ModelAveraging"),
    *("clip_grad_norm_", "exact", "no_sync", "prepare"),
)

__all__ = [
    "EXACT",
    "LOSSY",
    "REPAIRED",
    "BoundedDrift",
    "GradientAveraging",
    "Ledger",
    "LossyGradients",
    "ModelAveraging",
    "Options",
    "Reliability",
    "StormError",
    "__version__",
    "clip_grad_norm_",
    "connect",
    "exact",
    "faults",
    "lossy_hook",
    "lossy_reduce_scatter",
    "no_sync",
    "prepare",
    "simulate",
    "use_as_default",
]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    # torch takes seconds to import, so only what needs it brings it in.
    if name == "connect":
        from stormtorch.rendezvous import connect

        return connect
    if name == "use_as_default":
        from stormtorch.backend import use_as_default

        return use_as_default
    if name in _BACKEND:
        from stormtorch.backend import lossy

        return getattr(lossy, name)
    if name in _POLICIES:
        from stormtorch import policies

        return getattr(policies, name)
    if name == "simulate":
        from stormtorch.simulation import simulate

        return simulate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

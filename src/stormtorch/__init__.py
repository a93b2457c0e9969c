"""Distributed PyTorch training over networks that drop packets."""

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from stormtorch.errors import StormError
from stormtorch.faults import faults
from stormtorch.options import Options
from stormtorch.reliability import EXACT, LOSSY, Reliability

if TYPE_CHECKING:
    from stormtorch.backend.lossy import LossyGradients, lossy_hook, lossy_reduce_scatter
    from stormtorch.rendezvous import connect

__version__ = version("stormtorch")

__all__ = [
    "EXACT",
    "LOSSY",
    "LossyGradients",
    "Options",
    "Reliability",
    "StormError",
    "__version__",
    "connect",
    "faults",
    "lossy_hook",
    "lossy_reduce_scatter",
]


def __getattr__(name: str) -> Any:
    # torch takes seconds to import, so only what needs it brings it in.
    if name == "connect":
        from stormtorch.rendezvous import connect

        return connect
    if name in ("LossyGradients", "lossy_hook", "lossy_reduce_scatter"):
        from stormtorch.backend import lossy

        return getattr(lossy, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

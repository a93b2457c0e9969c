"""Networks, studies and benchmarks in which stormtorch is tried: nothing here is needed to train."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stormtorch_lab.policies import ADEL, AREA, MIFA, PARTEL, QSDP, SALF
    from stormtorch_lab.policies.light_dp import LightDp
    from stormtorch_lab.policies.private_drift import PrivateDrift
    from stormtorch_lab.simulation import simulate

# torch takes seconds to import, so what needs it is imported when it is first asked for.
_PLACES = {
    "ADEL": "policies",
    "AREA": "policies",
    "LightDp": "policies.light_dp",
    "MIFA": "policies",
    "PARTEL": "policies",
    "PrivateDrift": "policies.private_drift",
    "QSDP": "policies",
    "SALF": "policies",
    "simulate": "simulation",
}

__all__ = ["ADEL", "AREA", "MIFA", "PARTEL", "QSDP", "SALF", "LightDp", "PrivateDrift", "simulate"]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(import_module(f"stormtorch_lab.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

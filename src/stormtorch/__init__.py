"""Distributed PyTorch training over networks that drop packets."""

from importlib.metadata import version

from stormtorch.faults import faults
from stormtorch.options import Options
from stormtorch.reliability import EXACT, LOSSY, Reliability
from stormtorch.rendezvous import connect

__version__ = version("stormtorch")

__all__ = ["EXACT", "LOSSY", "Options", "Reliability", "__version__", "connect", "faults"]

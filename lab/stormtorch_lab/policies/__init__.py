"""Policies for federated, private and straggler-tolerant training, and policies by name for commands."""

from stormtorch_lab.policies.adel import ADEL
from stormtorch_lab.policies.area import AREA
from stormtorch_lab.policies.mifa import MIFA
from stormtorch_lab.policies.partel import PARTEL
from stormtorch_lab.policies.qsdp import QSDP
from stormtorch_lab.policies.salf import SALF

__all__ = ["ADEL", "AREA", "MIFA", "PARTEL", "QSDP", "SALF"]

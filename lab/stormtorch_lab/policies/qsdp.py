"""Quantised sharded training: owners train as under FSDP, and all that travels has few bits, rounded without bias."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch

from stormtorch.checks import check
from stormtorch.policies.policy import WIRES, OwnerPolicy
from stormtorch.reliability import EXACT, Reliability

_WIRE_OF = {32: torch.float32, 8: torch.int8, 4: WIRES[-1]}


@dataclass(frozen=True, kw_only=True)
class QSDP(OwnerPolicy):
    """Gradients to their owners and parameters to everyone, each block of neighbours on a random grid of its own.

    Owners keep float32 parameters and optimizer state, so that rounding is noise in what others compute with and never
    adds up; an owner's own shard is not rounded. Grids lie at random places: on average, gradients and copies are what
    was sent. Nothing is lost unless `reliability` says so. The algorithm is that of QSDP (Markov et al., 2023), which
    rounds both to 8 bits.
    """

    name: ClassVar[str] = "qsdp"
    bits: Literal[32, 8, 4] = 8
    """Bits of an element in both stages: 8 take a quarter of float32's bytes, 4 a seventh; 32 rounds nothing."""
    reliability: Reliability = EXACT
    """How much of a message may be missing, in both stages; by default nothing."""
    wire: torch.dtype = field(init=False, default=torch.int8)
    """Number format on the network, which `bits` chooses."""

    def __post_init__(self) -> None:
        check(self.bits in _WIRE_OF, "bits", "be 32, 8 or 4", self.bits)
        object.__setattr__(self, "wire", _WIRE_OF[self.bits])
        super().__post_init__()

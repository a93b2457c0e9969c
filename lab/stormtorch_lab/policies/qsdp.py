"""Quantised sharded training: sharded as under FSDP, with quantised gradients and parameters, rounded without bias."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch

from stormtorch.checks import check
from stormtorch.exchange.reliability import EXACT, Reliability
from stormtorch.policies.policy import WIRES, OwnerPolicy

_WIRE_OF = {32: torch.float32, 8: torch.int8, 4: WIRES[-1]}


@dataclass(frozen=True, kw_only=True)
class QSDP(OwnerPolicy):
    """Quantises gradients to their owners and parameters to all ranks, each block on its own random grid.

    Owners keep float32 parameters and optimizer state, so that rounding errors are noise in the copies and never
    accumulate; an owner's own shard is not rounded. Grids have random offsets, so that rounding is
    unbiased. Messages are exact unless `reliability` allows loss. The algorithm is that of QSDP (Markov et al., 2023),
    which rounds both to 8 bits.
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

"""Random seeds of a shard's step: owner and standby draw the same numbers and keep the program's generators intact."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch

_BITS = 24
"""Bits of a seed, which is sent as a float32 and must be exact in it."""


class Randomness:
    """Seeds torch's generators while an optimizer steps, if it draws from them.

    Args:
        devices: Devices of the parameters.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        gpus = sorted({each.index or 0 for each in devices if each.type == "cuda"})
        self._generators = [torch.default_generator, *(torch.cuda.default_generators[each] for each in gpus)]
        self._kept: list[torch.Tensor] = []
        self._seeded: list[torch.Tensor] = []
        self.needed = True
        """Whether the optimizer has drawn random numbers in the last step that was checked."""

    def fresh_seed(self, step: int) -> int:
        """Derives a seed from the program's random state without drawing from it; 0 if none is needed."""
        if not self.needed:
            return 0
        state = torch.default_generator.get_state().numpy().tobytes()
        return zlib.crc32(step.to_bytes(8, "little"), zlib.crc32(state)) & ((1 << _BITS) - 1) | 1

    def begin(self, seed: int) -> None:
        """Saves the program's random state, and seeds the generators for a step; does nothing if the seed is 0."""
        self.end()  # in case the last step has raised an error
        if seed:
            self._kept = [each.get_state() for each in self._generators]
            for each in self._generators:
                each.manual_seed(seed)
            self._seeded = [each.get_state() for each in self._generators]

    def end(self, *, look: bool = False) -> None:
        """Restores the program's random state.

        Args:
            look: Whether to check if the optimizer has drawn random numbers.
        """
        if look and self._kept:
            now = [each.get_state() for each in self._generators]
            self.needed = not all(map(torch.equal, now, self._seeded))
        for generator, state in zip(self._generators, self._kept, strict=False):
            generator.set_state(state)
        self._kept = []

"""Sampling of a worker's examples in a step, by seed, step and worker: the same on every machine.

Letters at the end of names, in all files of this folder: W workers, B examples of a batch.
"""

import hashlib
from typing import NamedTuple

import torch

PADDING = -1
"""Target that does not count, such as those behind the last word of a sentence."""


class Batch(NamedTuple):
    """Examples and the answers that a model should give."""

    inputs: torch.Tensor
    targets: torch.Tensor


class Epochs:
    """Choose examples so that one worker sees each of them once in an epoch.

    The last examples of an epoch, too few for a step of all workers, are left out.

    Args:
        count: Number of examples.
        batch: Examples of each worker in a step.
    """

    def __init__(self, count: int, batch: int) -> None:
        self._count = count
        self._batch = batch
        self._order: tuple[tuple[int, int], torch.Tensor] | None = None

    def chosen(self, seed: int, step: int, workers: int) -> torch.Tensor:
        """Indices of the examples of a step: (W, B)."""
        together = workers * self._batch
        epoch, within = divmod(step, max(self._count // together, 1))
        if self._order is None or self._order[0] != (seed, epoch):
            self._order = (seed, epoch), torch.randperm(self._count, generator=generator_of(seed, epoch, 0))
        places = (within * together + torch.arange(together)) % self._count
        return self._order[1][places].view(workers, self._batch)


def generator_of(seed: int, step: int, worker: int) -> torch.Generator:
    """Generator of the random numbers of one worker's step, on the CPU: the same on every machine."""
    # Hashed, as torch reads no more than 32 bits of a seed, and the three numbers do not fit into them.
    digest = hashlib.blake2b(f"{seed}/{step}/{worker}".encode(), digest_size=4).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest))

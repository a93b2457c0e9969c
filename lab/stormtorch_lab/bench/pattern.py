"""Test tensors of the all-reduce benchmarks: their sum is known, so that every result can be checked."""

import math

import torch

from stormtorch_lab.bench.backends import DTYPES
from stormtorch_lab.jobs.ranks import Member


class Pattern:
    """Contributions whose sum is known: small integers, exact in every dtype and in every order up to 64 ranks."""

    def __init__(self, size_bytes: int, dtype: str, member: Member) -> None:
        period = torch.arange(3).add(member.rank % 3).to(DTYPES[dtype])
        elements = max(size_bytes // period.element_size(), 1)
        self.own = period.repeat(math.ceil(elements / 3))[:elements]
        self.bytes = elements * period.element_size()
        self._member = member

    def _lowest(self) -> torch.Tensor:
        """The sum if all ranks contributed as rank 0 does."""
        return (self.own - self._member.rank % 3) * self._member.world

    def check(self, backend: str, result: torch.Tensor) -> None:
        """Raises RuntimeError unless the result is the sum of all ranks' contributions."""
        expected = self._lowest() + sum(rank % 3 for rank in range(self._member.world))
        wrong = int((result != expected).sum())
        if wrong:
            raise RuntimeError(f"{backend} gave a wrong sum in {wrong} of {result.numel()} elements")

    def check_range(self, backend: str, result: torch.Tensor) -> None:
        """Raises RuntimeError unless the result can be the mean of some contributions, times the ranks."""
        world = self._member.world
        lowest = self._lowest()
        # Means in half precision are rounded.
        slack = world * torch.finfo(result.dtype).eps * 4
        wrong = int(((result < lowest - slack) | (result > lowest + 2 * world + slack)).sum())
        if wrong:
            raise RuntimeError(
                f"{backend} gave values that no mean of contributions can have, in {wrong} of {result.numel()} elements"
            )

"""Stale replicas without stored copies: the age of a chunk identifies its value among the earlier broadcasts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stormtorch.policies import rules
from stormtorch.policies.policy import applied
from stormtorch_lab.simulation.parameters.chunks import Chunks

# Initial number of stored broadcasts; `reserve_versions` doubles it when a copy grows too old.
_VERSIONS_AT_FIRST = 4
MOST_VERSIONS = 120
"""Age at which a copy is fetched exactly, under any policy."""


class Replicas:
    """The owners' parameters, their recent broadcasts, and the age of each worker's copies.

    Args:
        chunks: Layout of parameters, and owners of chunks.
        first: First worker that this process simulates.
        last: Worker after the last one.
        device: Device of all tensors.
    """

    def __init__(self, chunks: Chunks, first: int, last: int, device: torch.device) -> None:
        self._chunks = chunks
        # The last version is not a broadcast but the owners' parameters.
        self._versions = chunks.empty(_VERSIONS_AT_FIRST + 1, device=device)
        self.ages = torch.zeros(last - first, chunks.count, dtype=torch.uint8, device=device)
        """Age of each worker's copies, in steps."""
        self.own = chunks.owner_C.to(device) == torch.arange(first, last, device=device).unsqueeze(1)
        """Whether a worker owns each chunk, and so has no copy of it."""
        self._rows_C = torch.arange(chunks.count, device=device)
        self.steps = 0
        """Number of broadcasts so far."""

    @property
    def owned(self) -> torch.Tensor:
        """Exact parameters of the owners, (C, E), updated in place; `reserve_versions` replaces the tensor."""
        return self._versions[-1]

    @property
    def versions(self) -> int:
        """Number of stored broadcasts."""
        return len(self._versions) - 1

    def begin(self) -> None:
        """Copies the owners' parameters to all workers."""
        self._versions[: self.versions] = self.owned
        self.ages.zero_()

    def reserve_versions(self, oldest: int) -> bool:
        """Before a broadcast, reserves capacity for copies older than `oldest`. Returns whether it had to."""
        if oldest + 2 <= self.versions:
            return False
        enlarged = self._chunks.empty(2 * self.versions + 1, device=self._versions.device)
        for age in range(self.versions):
            step = self.steps - age
            enlarged[step % (2 * self.versions)] = self._versions[step % self.versions]
        enlarged[-1] = self.owned
        self._versions = enlarged
        return True

    def next_version(self) -> torch.Tensor:
        """Returns the buffer (C, E) of the next broadcast, which held a version that no copy uses any more."""
        return self._versions[(self.steps + 1) % self.versions]

    def broadcast(self, arrived_WC: torch.Tensor) -> None:
        """Broadcasts `next_version`, of which some chunks arrive."""
        self.steps += 1
        rules.advance_ages(self.ages, arrived_WC)

    def version_indices(self, first: int, last: int) -> torch.Tensor:
        """Returns the version (W, C) of each copy, for some of this process's workers."""
        version_WC = torch.remainder(self.steps - self.ages[first:last].to(torch.int64), self.versions)
        return version_WC.masked_fill_(self.own[first:last], self.versions)

    def put(self, first: int, last: int, replicas_WCE: torch.Tensor) -> None:
        """Writes the replicas of some of this process's workers."""
        rows_WC = self.version_indices(first, last).mul_(self._chunks.count).add_(self._rows_C)
        rows = replicas_WCE.view(-1, self._chunks.per_chunk)
        torch.index_select(self._versions.view(-1, self._chunks.per_chunk), 0, rows_WC.flatten(), out=rows)

    def sample(self, chunk_S: torch.Tensor, element_S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns all workers' copies (W, S) of some elements, and whether each worker owns them."""
        versions_WS = self.version_indices(0, len(self.ages))[:, chunk_S]
        values_VS = self._versions[:, chunk_S, element_S]
        return values_VS.gather(0, versions_WS), self.own[:, chunk_S]

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {"versions": self._versions, "ages": self.ages, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from the state of a checkpoint."""
        self._versions = state["versions"].to(self._versions.device)
        self.ages.copy_(state["ages"])
        self.steps = state["steps"]


class Copies(Replicas):
    """Replicas with stored copies, for policies whose `accept` yields values other than stale or new ones.

    Args:
        chunks: Layout of parameters, and owners of chunks.
        first: First worker that this process simulates.
        last: Worker after the last one.
        device: Device of all tensors.
        accept: The policy's `accept`.
    """

    def __init__(
        self,
        chunks: Chunks,
        first: int,
        last: int,
        device: torch.device,
        accept: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None:
        super().__init__(chunks, first, last, device)
        self._copies = chunks.empty(last - first, device=device)
        self._accept = accept

    def begin(self) -> None:
        """Copies the owners' parameters to all workers."""
        super().begin()
        self._copies.copy_(self.owned.expand_as(self._copies))

    def broadcast(self, arrived_WC: torch.Tensor) -> None:
        """Broadcasts `next_version`; every worker accepts the received chunks."""
        broadcast_CE = self.next_version()
        super().broadcast(arrived_WC)
        for own_CE, arrived_C in zip(self._copies, arrived_WC, strict=True):
            # A copy with NaN for lost chunks, so that a policy that wrongly uses them fails visibly.
            seen_CE = broadcast_CE.masked_fill(~arrived_C.unsqueeze(-1), torch.nan)
            own_CE.copy_(applied(self._accept, own_CE, seen_CE, arrived_C.unsqueeze(-1)))

    def put(self, first: int, last: int, replicas_WCE: torch.Tensor) -> None:
        """Writes the replicas of some of this process's workers."""
        replicas_WCE.copy_(torch.where(self.own[first:last].unsqueeze(-1), self.owned, self._copies[first:last]))

    def sample(self, chunk_S: torch.Tensor, element_S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns all workers' copies (W, S) of some elements, and whether each worker owns them."""
        own_WS = self.own[:, chunk_S]
        return torch.where(own_WS, self.owned[chunk_S, element_S], self._copies[:, chunk_S, element_S]), own_WS

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint, with the copies."""
        return super().state_dict() | {"copies": self._copies}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from the state of a checkpoint, with the copies."""
        super().load_state_dict(state)
        self._copies.copy_(state["copies"])

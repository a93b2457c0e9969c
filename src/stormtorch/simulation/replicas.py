"""Replicas that are not stored: each chunk's stale value is some earlier broadcast, so its age says all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stormtorch.policies import rules
from stormtorch.simulation.chunks import Cut

# More are made room for when a copy grows older than these.
_VERSIONS_AT_FIRST = 4
MOST_VERSIONS = 120
"""A copy that is as old as this is fetched exactly, whatever the policy says."""


class Replicas:
    """What the owners have, what they sent in the last steps, and how old each worker's copies are.

    Args:
        cut: How the vector is cut.
        first: The first of the workers that this process simulates.
        last: The one after the last.
        device: Where.
    """

    def __init__(self, cut: Cut, first: int, last: int, device: torch.device) -> None:
        self._cut = cut
        # The last of the versions is the owners' own.
        self._versions = cut.empty(_VERSIONS_AT_FIRST + 1, device=device)
        self.ages = torch.zeros(last - first, cut.chunks, dtype=torch.uint8, device=device)
        """Steps, of each worker's copies."""
        self.own = cut.owner_C.to(device) == torch.arange(first, last, device=device).unsqueeze(1)
        """Which of them are no copies: a worker's own chunks."""
        self._rows_C = torch.arange(cut.chunks, device=device)
        self.steps = 0
        """Broadcasts so far."""

    @property
    def owned(self) -> torch.Tensor:
        """(C, E): the owners' exact parameters. Written in place by the optimizer; another tensor after `make_room`."""
        return self._versions[-1]

    @property
    def versions(self) -> int:
        """Broadcasts that are remembered."""
        return len(self._versions) - 1

    def begin(self) -> None:
        """All copies are what the owners have."""
        self._versions[: self.versions] = self.owned
        self.ages.zero_()

    def make_room(self, oldest: int) -> bool:
        """Before a broadcast: whether there had to be made room for copies that will be a step older than `oldest`."""
        if oldest + 2 <= self.versions:
            return False
        grown = self._cut.empty(2 * self.versions + 1, device=self._versions.device)
        for age in range(self.versions):
            step = self.steps - age
            grown[step % (2 * self.versions)] = self._versions[step % self.versions]
        grown[-1] = self.owned
        self._versions = grown
        return True

    def next_room(self) -> torch.Tensor:
        """(C, E): where the next broadcast goes. Nobody's copy is that old any more."""
        return self._versions[(self.steps + 1) % self.versions]

    def broadcast(self, arrived_WC: torch.Tensor) -> None:
        """What is in `next_room` was sent; some of it arrived."""
        self.steps += 1
        rules.grow_older(self.ages, arrived_WC)

    def places(self, first: int, last: int) -> torch.Tensor:
        """(W, C): of some of this process's workers, which version each of their copies is."""
        version_WC = torch.remainder(self.steps - self.ages[first:last].to(torch.int64), self.versions)
        return version_WC.masked_fill_(self.own[first:last], self.versions)

    def put(self, first: int, last: int, replicas_WCE: torch.Tensor) -> None:
        """Writes the replicas of some of this process's workers."""
        rows_WC = self.places(first, last).mul_(self._cut.chunks).add_(self._rows_C)
        rows = replicas_WCE.view(-1, self._cut.per_chunk)
        torch.index_select(self._versions.view(-1, self._cut.per_chunk), 0, rows_WC.flatten(), out=rows)

    def look(self, chunk_S: torch.Tensor, element_S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(W, S): everyone's copies of some elements, and which of them are owners' own."""
        places_WS = self.places(0, len(self.ages))[:, chunk_S]
        values_VS = self._versions[:, chunk_S, element_S]
        return values_VS.gather(0, places_WS), self.own[:, chunk_S]

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"versions": self._versions, "ages": self.ages, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From one."""
        self._versions = state["versions"].to(self._versions.device)
        self.ages.copy_(state["ages"])
        self.steps = state["steps"]


class Copies(Replicas):
    """Replicas that are stored, for policies that make something else of a broadcast than a stale or a new copy.

    Args:
        cut: How the vector is cut.
        first: The first of the workers that this process simulates.
        last: The one after the last.
        device: Where.
        accept: What a worker makes of what it has, of what came, and of which chunks arrived.
    """

    def __init__(
        self,
        cut: Cut,
        first: int,
        last: int,
        device: torch.device,
        accept: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None:
        super().__init__(cut, first, last, device)
        self._copies = cut.empty(last - first, device=device)
        self._accept = accept

    def begin(self) -> None:
        """Makes all copies what the owners have."""
        super().begin()
        self._copies.copy_(self.owned.expand_as(self._copies))

    def broadcast(self, arrived_WC: torch.Tensor) -> None:
        """Lets every worker take what arrived of `next_room`."""
        came_CE = self.next_room()
        super().broadcast(arrived_WC)
        for own_CE, arrived_C in zip(self._copies, arrived_WC, strict=True):
            own_CE.copy_(self._accept(own_CE, came_CE, arrived_C.unsqueeze(-1)))

    def put(self, first: int, last: int, replicas_WCE: torch.Tensor) -> None:
        """Writes the replicas of some of this process's workers."""
        replicas_WCE.copy_(torch.where(self.own[first:last].unsqueeze(-1), self.owned, self._copies[first:last]))

    def look(self, chunk_S: torch.Tensor, element_S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(W, S): everyone's copies of some elements, and which of them are owners' own."""
        own_WS = self.own[:, chunk_S]
        return torch.where(own_WS, self.owned[chunk_S, element_S], self._copies[:, chunk_S, element_S]), own_WS

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint."""
        return super().state_dict() | {"copies": self._copies}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a checkpoint."""
        super().load_state_dict(state)
        self._copies.copy_(state["copies"])

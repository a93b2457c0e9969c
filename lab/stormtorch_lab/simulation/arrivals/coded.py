"""Arrival masks under forward error correction: which chunks arrive, or are recovered by parity.

Every stretch of a message is its data chunks followed by its parity chunks, both subject to loss. The stretches are
those of `theory.redundancy`, as in the engine. W workers, S shards, T stretches of all shards, C data chunks, P
positions of data and parity chunks, B workers of a block of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stormtorch import theory
from stormtorch.network.loss import LossModel
from stormtorch_lab.simulation.arrivals.loss_chains import ShardLayout
from stormtorch_lab.simulation.arrivals.masks import Masks

# Positions to count at a time.
_POSITIONS_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class Counts:
    """Datagrams of one exchange, over all workers."""

    sent_W: Tensor
    """Datagrams that each worker sent, parity included."""
    lost_W: Tensor
    """Datagrams of each worker that were lost, parity included."""
    parity: int
    """Datagrams with parity that all workers sent together."""
    recovered: Tensor
    """Lost data chunks that were recovered."""


@dataclass(frozen=True)
class _Layout:
    """The messages to or from each shard's owner."""

    sent_P: Tensor
    """Whether each position is sent: a shard has positions for its largest possible parity."""
    parity_S: Tensor
    """Parity chunks of each message."""


class CodedMasks:
    """Draws which chunks arrive, exchange after exchange, if messages may have parity.

    Args:
        network: The loss model.
        workers: Number of workers, W.
        owner_C: Owner of each data chunk, int64 and ascending.
        seed: Random seed.
        device: Device of the masks.
        most: Most parity chunks for each data chunk.
    """

    def __init__(
        self, network: LossModel, workers: int, owner_C: Tensor, seed: int, device: torch.device | str, most: float
    ) -> None:
        self.workers = workers
        self.device = torch.device(device)
        self._owner_C = owner_C.to(self.device)
        shards = ShardLayout.of(owner_C.cpu())
        self._size_S: list[int] = shards.size_S.tolist()
        self._owner_S = owner_C.cpu()[shards.first_S]
        self._first_S = shards.first_S
        self._lay_out(most)
        self._masks = Masks(network, workers, self._at_positions(self._owner_S), seed, device)
        self._layouts: dict[tuple[int, ...], _Layout] = {}
        self.counts: Counts | None = None
        """Datagrams of the last exchange."""

    @property
    def owner_C(self) -> Tensor:
        """Owner of each data chunk, on the device."""
        return self._owner_C

    def up(self, owner_C: Tensor | None = None, redundancy_W: Sequence[float] | None = None) -> Tensor:
        """Draws stage 1, bool (W, C): whether the owner of chunk c receives or recovers that of worker w.

        Args:
            owner_C: Owner of each chunk in this exchange only.
            redundancy_W: Parity chunks that each worker sends for each data chunk; None sends none.
        """
        wanted = redundancy_W or [0.0] * self.workers
        kinds = {each: self._layout([each] * len(self._size_S)) for each in set(wanted)}
        rows = {each: [worker for worker, its in enumerate(wanted) if its == each] for each in kinds}
        if len(kinds) == 1:
            sent_WP = next(iter(kinds.values())).sent_P.expand(self.workers, -1)
        else:
            sent_WP = torch.empty(self.workers, len(self._nth_P), dtype=torch.bool, device=self.device)
            for each, layout in kinds.items():
                sent_WP[rows[each]] = layout.sent_P
        owner_P = self._relabelled(owner_C)
        arrived_WP = self._masks.up(owner_P, sent_WP)
        arrived_WC = torch.empty(self.workers, len(self._owner_C), dtype=torch.bool, device=self.device)
        owner_S = self._owner_S if owner_C is None else owner_C.cpu()[self._first_S]
        parity = 0
        for each, layout in kinds.items():
            for part in torch.split(torch.tensor(rows[each]), max(1, _POSITIONS_AT_ONCE // len(self._nth_P))):
                there = part.to(self.device)
                arrived_WC[there] = self._recovered(arrived_WP[there], layout)
            own = torch.bincount(owner_S, layout.parity_S, minlength=self.workers)
            parity += int((layout.parity_S.sum() - own[rows[each]]).sum())
        self._count(arrived_WP, arrived_WC, sent_WP, owner_P, parity, up=True)
        return arrived_WC

    def down(self, owner_C: Tensor | None = None, redundancy_W: Sequence[float] | None = None) -> Tensor:
        """Draws stage 2, bool (W, C): whether worker w receives or recovers chunk c from its owner; see `up`."""
        owner_S = self._owner_S if owner_C is None else owner_C.cpu()[self._first_S]
        wanted = redundancy_W or [0.0] * self.workers
        layout = self._layout([wanted[owner] for owner in owner_S.tolist()])
        sent_WP = layout.sent_P.expand(self.workers, -1)
        owner_P = self._relabelled(owner_C)
        arrived_WP = self._masks.down(owner_P, sent_WP)
        rows = max(1, _POSITIONS_AT_ONCE // len(self._nth_P))
        arrived_WC = torch.cat([self._recovered(part, layout) for part in torch.split(arrived_WP, rows)])
        parity = int(layout.parity_S.sum()) * (self.workers - 1)
        self._count(arrived_WP, arrived_WC, sent_WP, owner_P, parity, up=False)
        return arrived_WC

    def retransmitted(self, missing_WC: Tensor, *, up: bool, owner_C: Tensor | None = None) -> Tensor:
        """Draws retransmissions, without parity; see `Masks.retransmitted`."""
        missing_WP = torch.zeros(self.workers, len(self._nth_P), dtype=torch.bool, device=self.device)
        missing_WP[:, self._data_C] = missing_WC
        return self._masks.retransmitted(missing_WP, up=up, owner_C=self._relabelled(owner_C))[:, self._data_C]

    def state_dict(self) -> dict[str, Any]:
        """Returns all that later masks depend on."""
        return self._masks.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from the `state` of masks of the same network, workers, owners, redundancy and kind of device."""
        self._masks.load_state_dict(state)

    def _at_positions(self, of_S: Tensor) -> Tensor:
        return of_S.repeat_interleave(self._positions_S)

    def _relabelled(self, owner_C: Tensor | None) -> Tensor | None:
        return None if owner_C is None else self._at_positions(owner_C.cpu()[self._first_S])

    def _lay_out(self, most: float) -> None:
        """Gives each shard positions for its data and its largest possible parity, in the order of sending."""
        stretches_S = [theory.stretches_of(size) for size in self._size_S]
        # Shard and size of the first block of each stretch, and how many blocks it has.
        self._stretches = [(s, blocks[0], len(blocks)) for s, cut in enumerate(stretches_S) for blocks in cut]
        parity_of_position: list[Tensor] = []
        block_of_position: list[Tensor] = []
        needed: list[int] = []
        positions_T: list[int] = []
        positions_S = [0] * len(stretches_S)
        for shard, blocks in ((s, blocks) for s, cut in enumerate(stretches_S) for blocks in cut):
            several = len(blocks)
            data, parity = torch.arange(sum(blocks)), torch.arange(several * theory.block_parity(most, blocks[0]))
            block_of_position += [len(needed) + data % several, len(needed) + parity % several]
            parity_of_position += [torch.full_like(data, -1), parity // several]
            needed += blocks
            positions_T.append(len(data) + len(parity))
            positions_S[shard] += positions_T[-1]
        self._positions_S = torch.tensor(positions_S)
        self._nth_P = torch.cat(parity_of_position)
        """Index of each position among the parity chunks of its block; negative for data."""
        self._stretch_P = torch.arange(len(positions_T)).repeat_interleave(torch.tensor(positions_T))
        self._data_C = (self._nth_P < 0).nonzero().flatten().to(self.device)
        self._block_P = torch.cat(block_of_position).to(self.device)
        self._needed = torch.tensor(needed, device=self.device)
        """Data chunks of each block: that many arrivals recover the block."""

    def _layout(self, redundancy_S: Sequence[float]) -> _Layout:
        """Returns which positions are sent if the messages of the shards have these redundancies."""
        parity_T = tuple(theory.block_parity(redundancy_S[shard], size) for shard, size, _ in self._stretches)
        found = self._layouts.get(parity_T)
        if found is not None:
            return found
        parity_S = torch.zeros(len(self._size_S), dtype=torch.int64)
        for (shard, _, several), parity in zip(self._stretches, parity_T, strict=True):
            parity_S[shard] += several * parity
        sent_P = self._nth_P < torch.tensor(parity_T)[self._stretch_P]
        if len(self._layouts) >= 64:
            self._layouts.clear()
        found = self._layouts[parity_T] = _Layout(sent_P.to(self.device), parity_S)
        return found

    def _recovered(self, arrived_BP: Tensor, layout: _Layout) -> Tensor:
        """Returns which data chunks (B, C) are received or recovered: blocks with enough arrivals are complete."""
        received_BP = (arrived_BP & layout.sent_P).float()
        received = torch.zeros(len(received_BP), len(self._needed), device=self.device).index_add_(
            1, self._block_P, received_BP
        )
        complete = received >= self._needed
        return arrived_BP[:, self._data_C] | complete[:, self._block_P[self._data_C]]

    def _count(
        self, arrived_WP: Tensor, arrived_WC: Tensor, sent_WP: Tensor, owner_P: Tensor | None, parity: int, *, up: bool
    ) -> None:
        owner_P = (self._masks.owner_C if owner_P is None else owner_P).to(self.device)
        travels_WP = sent_WP.clone()
        travels_WP[owner_P, torch.arange(len(owner_P), device=self.device)] = False
        lost_WP = travels_WP & ~arrived_WP
        if up:
            sent_W, lost_W = travels_WP.sum(1).double(), lost_WP.sum(1).double()
        else:
            nothing_W = torch.zeros(self.workers, dtype=torch.float64, device=self.device)
            sent_W = nothing_W.index_add(0, owner_P, travels_WP.sum(0).double())
            lost_W = nothing_W.index_add(0, owner_P, lost_WP.sum(0).double())
        recovered = lost_WP[:, self._data_C].sum() - (~arrived_WC).sum()
        self.counts = Counts(sent_W, lost_W, parity, recovered)

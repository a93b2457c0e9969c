"""Exchanges of virtual workers: received chunks under loss, retransmission or parity, and the bytes sent."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stormtorch.checks import BadSetting
from stormtorch.exchange.reliability import EXACT, Reliability
from stormtorch.network.loss import SlowBackward
from stormtorch.policies import rules
from stormtorch.policies.convergence_guard import LossMeter
from stormtorch.policies.policy import OwnerPolicy, Policy
from stormtorch.policies.rank_policy import RankPolicy
from stormtorch.telemetry.ledger import LedgerRow
from stormtorch_lab.simulation.arrivals.coded import CodedMasks, Counts
from stormtorch_lab.simulation.arrivals.masks import Masks
from stormtorch_lab.simulation.arrivals.repair import arrived
from stormtorch_lab.simulation.setting import Setting


class Exchanges:
    """Draws the arrivals of all exchanges of a training.

    Args:
        setting: Setting of the simulation.
        policy: The user's policy: messages have space for its largest parity.
        owner_C: Owners of the exchanged chunks; None takes those of the whole model.
        seed: Distinguishes several exchanges of one training.
    """

    def __init__(self, setting: Setting, policy: Policy, owner_C: Tensor | None = None, seed: int = 0) -> None:
        self._setting = setting
        owner_C = setting.chunks.owner_C if owner_C is None else owner_C
        n, seed, device = setting.workers, setting.seed + 7919 * seed, setting.device
        self._chunks = owner_C.numel()
        self._up_cells, self._down_cells = _cells_per_chunk(setting, policy)
        self._cells = self._chunks
        down_C = owner_C
        if self._up_cells > 1 or self._down_cells > 1:
            (owner_C, self._chunk_of_up), (down_C, self._chunk_of_down) = (
                _grouped(owner_C, cells) for cells in (self._up_cells, self._down_cells)
            )
            self._chunks = owner_C.numel()
        self._masks: Masks | CodedMasks
        self._senders: Senders | None = None
        longest = int(torch.bincount(owner_C).max())
        most = max(
            policy.redundancy_of(stage, loss / 100, longest, setting.compression_ratio)
            for stage in (policy.up, policy.down)
            for loss in range(101)
        )
        if most and isinstance(setting.network, SlowBackward):
            # Parity combines chunks, some of which would not be computed.
            raise BadSetting("redundancy", "must be 0 over a SlowBackward")
        if most:
            self._masks = CodedMasks(setting.network, n, owner_C, seed, device, most)
            self._senders = Senders(longest, setting.compression_ratio, n)
        else:
            self._masks = Masks(setting.network, n, owner_C, seed, device)
        self._masks_down = self._masks
        if down_C is not owner_C:
            self._masks_down = Masks(setting.network, n, down_C, seed + 1, device)

    def draw(
        self, policy: Policy, row: LedgerRow, *, up: bool, owner_C: Tensor | None = None, exact: bool = False
    ) -> Tensor:
        """Returns which chunks (W, C) have arrived at the end of a stage, and counts its bytes.

        Bytes include parity and the retransmissions that a budget needs, as the mean over workers. In an exact stage
        every chunk counts once: its retransmissions are not drawn.

        Args:
            policy: Policy of the step.
            row: Row of the step.
            up: Whether chunks are sent to their owners; otherwise by them.
            owner_C: Owner of each chunk in this exchange only.
            exact: Whether the stage is exact, regardless of the policy.
        """
        setting, senders = self._setting, self._senders
        reliability = EXACT if exact else policy.up if up else policy.down
        each = setting.datagram_bytes / setting.workers
        masks = self._masks if up else self._masks_down
        if up and isinstance(setting.network, SlowBackward):
            _apply_deadline(masks, policy, row)
        chunks = masks.owner_C.numel()
        row.bytes_sent += round(chunks * (setting.workers - 1) * each)
        redundancy_W = None if senders is None else senders.redundancy(policy, reliability)
        if chunks != self._cells or self._masks_down is not self._masks:
            arrived_WC, retransmitted = arrived(masks, reliability, up=up, redundancy_W=redundancy_W)
            row.bytes_sent += round(retransmitted * each)
            return arrived_WC[:, self._chunk_of_up if up else self._chunk_of_down]
        arrived_WC, retransmitted = arrived(masks, reliability, up=up, owner_C=owner_C, redundancy_W=redundancy_W)
        row.bytes_sent += round(retransmitted * each)
        if senders is not None and isinstance(self._masks, CodedMasks) and not reliability.exact:
            counts = self._masks.counts
            assert counts is not None
            senders.count(counts)
            row.bytes_sent += round(counts.parity * each)
            row.parity_bytes += round(counts.parity * each)
            row.recovered += int(counts.recovered)
        return arrived_WC

    def draw_pairs(self, policy: Policy, row: LedgerRow, partner_W: list[int]) -> Tensor:
        """Returns which chunks (W, C) each worker received from its partner; none without a partner.

        All chunks must have one owner, so that a link carries a whole model.
        """
        setting = self._setting
        arrived_WC = torch.zeros(setting.workers, self._chunks, dtype=torch.bool, device=setting.device)
        for worker, partner in enumerate(partner_W):
            if partner != worker:
                row.bytes_sent += round(self._chunks * setting.datagram_bytes / setting.workers)
                source_C = torch.full((self._chunks,), partner)
                # Drawn for all workers, but only one receives: retransmissions to the others are not sent.
                from_partner_WC = arrived(self._masks, policy.up, up=False, owner_C=source_C).arrived_WC
                arrived_WC[worker] = from_partner_WC[worker]
        return arrived_WC

    def changed(self, policy: Policy, *, up: bool) -> list[tuple[float, float]] | None:
        """Returns what meters must `translate` before a stage's next exchange, for each worker; None is nothing."""
        stage = policy.up if up else policy.down
        return None if self._senders is None or stage.budget < 1.0 else self._senders.changed(policy, stage, up=up)

    def first_pass_down(self, policy: Policy) -> Tensor:
        """Draws the losses that a repaired broadcast would have had."""
        if self._senders is None or not isinstance(self._masks, CodedMasks):
            return self._masks.down()
        return self._masks.down(redundancy_W=self._senders.redundancy(policy, policy.down))

    def end_step(self) -> None:
        """Called after every step: senders learn what was lost."""
        if self._senders is not None:
            self._senders.end_step()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        state = self._masks.state_dict()
        if self._masks_down is not self._masks:
            return {"up": state, "down": self._masks_down.state_dict()}
        return state if self._senders is None else {"masks": state, "senders": self._senders.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from the state of a checkpoint."""
        if self._masks_down is not self._masks:
            self._masks.load_state_dict(state["up"])
            self._masks_down.load_state_dict(state["down"])
            return
        self._masks.load_state_dict(state if self._senders is None else state["masks"])
        if self._senders is not None:
            self._senders.load_state_dict(state["senders"])


def _apply_deadline(masks: Masks | CodedMasks, policy: Policy, row: LedgerRow) -> None:
    """Sets the deadline of slow workers for a step, if the policy has one.

    Raises:
        BadSetting: The policy would retransmit gradients that were not computed.
    """
    if isinstance(masks, CodedMasks) or not isinstance(policy, OwnerPolicy):
        return
    masks.deadline_s = row.deadline_s = None if policy.deadline is None else seconds_of(policy, row.step)
    if masks.deadline_s is not None and policy.up.budget < 1.0:
        raise BadSetting(
            "gradients", "must have a budget of 1: gradients that were not computed in time cannot be retransmitted"
        )


def seconds_of(policy: OwnerPolicy, step: int) -> float | None:
    """Returns the deadline of a step in seconds; None waits for all workers.

    Raises:
        BadSetting: The policy learns its deadlines, but virtual workers have no clock.
    """
    deadline = policy.deadline_at(step)
    if deadline == "auto":
        raise BadSetting("deadline", "must be None or in seconds in a simulation: virtual workers have no clock")
    return deadline


def _cells_per_chunk(setting: Setting, policy: Policy) -> tuple[int, int]:
    """Number of the simulation's chunks per datagram, up and down: more than one only in sparse codes."""
    codes = policy.codes if isinstance(policy, RankPolicy) else None
    if codes is None:
        return 1, 1
    chunk_bytes = setting.float32_per_chunk * 4
    return codes[0].blocks(chunk_bytes), codes[1].blocks(chunk_bytes)


def _grouped(owner_C: Tensor, cells: int) -> tuple[Tensor, Tensor]:
    """Packs neighbouring chunks of an owner into datagrams; returns owners of datagrams, and datagrams of chunks."""
    counts = torch.bincount(owner_C)
    each = -(-counts // cells)
    firsts, datagram_offsets = counts.cumsum(0) - counts, each.cumsum(0) - each
    datagram_C = datagram_offsets[owner_C] + (torch.arange(len(owner_C)) - firsts[owner_C]) // cells
    return torch.arange(len(counts)).repeat_interleave(each), datagram_C


class Senders:
    """Chooses how much parity each worker sends, from the measured loss of its datagrams.

    Args:
        chunks: Data chunks of the largest message.
        narrower: Bytes of float32 divided by those of the wire.
        workers: Number of workers, W.
    """

    def __init__(self, chunks: int, compression_ratio: float, workers: int) -> None:
        self._chunks, self._narrower = chunks, compression_ratio
        self._loss_W = LossMeter(torch.zeros(workers, dtype=torch.float64))
        self._reported: list[tuple[Tensor, Tensor]] = []
        self._latest: list[tuple[Tensor, Tensor]] = []
        # Redundancy of each worker in the last exchange of a stage that may lose, by whether that was the first.
        self._last = {up: [0.0] * workers for up in (True, False)}

    def redundancy(self, policy: Policy, stage: Reliability) -> list[float]:
        """Returns the parity chunks that each worker sends for each data chunk."""
        losses = self._loss_W.value.tolist()
        return [policy.redundancy_of(stage, loss, self._chunks, self._narrower) for loss in losses]

    def changed(self, policy: Policy, stage: Reliability, *, up: bool) -> list[tuple[float, float]] | None:
        """Returns the factor by which the next redundancy changes each worker's loss, and its loss without any."""
        losses, before, now = self._loss_W.value.tolist(), self._last[up], self.redundancy(policy, stage)
        if before == now:
            return None
        self._last[up] = now
        each_W = zip(losses, before, now, strict=True)
        return [
            (rules.residual_loss_ratio(loss, self._chunks, was, will), 1.0 if was == will else loss)
            for loss, was, will in each_W
        ]

    def count(self, counts: Counts) -> None:
        """Counts an exchange of the present step."""
        self._latest.append((counts.lost_W.cpu(), counts.sent_W.cpu()))

    def end_step(self) -> None:
        """Applies the reports of the previous step's exchanges: they are sent with the next exchange."""
        if self._reported:
            lost_W, sent_W = (sum(each, torch.zeros(())) for each in zip(*self._reported, strict=True))
            self._loss_W.add(lost_W, sent_W)
        self._reported, self._latest = self._latest, []

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {"loss": self._loss_W.state, "told": self._reported, "last": self._last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from the state of a checkpoint."""
        self._loss_W.restore(*(each.cpu() for each in state["loss"]))
        self._reported = [(lost.cpu(), sent.cpu()) for lost, sent in state["told"]]
        self._latest, self._last = [], state["last"]

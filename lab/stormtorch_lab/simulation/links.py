"""Measures the loss of every link from the owners' reports, for policies that weigh contributions by it."""

from __future__ import annotations

from typing import Any

import torch

from stormtorch.policies.convergence_guard import LossMeter


class LinkLosses:
    """Measures the loss of each worker's chunks at each owner.

    Args:
        workers: Number of workers; 0 if the policy does not weigh, as memory grows with its square.
        device: Device of the counts.
    """

    def __init__(self, workers: int, device: torch.device) -> None:
        self._loss_WN = LossMeter(torch.zeros(workers, workers, device=device))
        self._reported_WN: torch.Tensor | None = None
        self._device = device

    def next(self, lost_WC: torch.Tensor, owner_C: torch.Tensor, chunks_W: torch.Tensor) -> torch.Tensor:
        """Returns the loss (W, C) of each chunk's link, as senders know it before an exchange, and counts the exchange.

        Args:
            lost_WC: Whether the exchange loses each chunk of each worker.
            owner_C: Owner of each chunk.
            chunks_W: Number of chunks that each worker owns.
        """
        loss_WN, workers = self._loss_WN.value, len(chunks_W)
        missing_WN = torch.zeros(workers, workers, device=self._device)
        missing_WN.index_add_(1, owner_C, lost_WC.float())
        # Counts are one exchange late: owners report losses while the next gradients are in flight.
        if self._reported_WN is not None:
            self._loss_WN.add(self._reported_WN, chunks_W.float().expand(workers, workers))
        self._reported_WN = missing_WN
        return loss_WN[:, owner_C]

    def translate(self, changed_W: list[tuple[float, float]]) -> None:
        """Converts the counts to messages with another redundancy; see `LossMeter.translate`.

        Args:
            changed_W: Factor and bound of each worker.
        """
        factor_W1, most_W1 = torch.tensor(changed_W, device=self._device).T.unsqueeze(-1)
        self._loss_WN.translate(factor_W1, most_W1)
        if self._reported_WN is not None:
            self._reported_WN = self._reported_WN * factor_W1  # reported late: counted with the redundancy so far

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {"loss": self._loss_WN.state, "told": self._reported_WN}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from the state of a checkpoint."""
        lost_WN, sent_WN = state["loss"]
        self._loss_WN.restore(lost_WN.to(self._device), sent_WN.to(self._device))
        reported_WN = state["told"]
        self._reported_WN = None if reported_WN is None else reported_WN.to(self._device)

"""Retransmission between virtual workers: repairs messages until at most their budget is missing."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stormtorch.exchange.reliability import Reliability
from stormtorch_lab.simulation.arrivals.coded import CodedMasks
from stormtorch_lab.simulation.arrivals.masks import Masks

# Rounds without any arrival after which a link counts as dead.
_PATIENCE = 10_000


class Repaired(NamedTuple):
    """Received chunks at the end of a stage, and the retransmissions that it took."""

    arrived_WC: Tensor
    """Which chunks have arrived."""
    retransmitted: int
    """Number of retransmitted chunks, over all workers."""


def arrived(
    masks: Masks | CodedMasks,
    reliability: Reliability,
    *,
    up: bool,
    owner_C: Tensor | None = None,
    redundancy_W: Sequence[float] | None = None,
) -> Repaired:
    """Returns which chunks (W, C) have arrived once at most the budget of each message is missing.

    Args:
        masks: Draws the losses of the network.
        reliability: Reliability of this exchange; an exact one draws no losses, and counts no retransmissions.
        up: Whether chunks are sent to their owners; otherwise by them.
        owner_C: Owner of each chunk in this exchange only; None is that of the masks.
        redundancy_W: Parity chunks that each worker sends for each data chunk; None sends none.

    Raises:
        ValueError: A link loses everything, so that no budget can be met.
    """
    n, at_C = masks.workers, masks.owner_C if owner_C is None else owner_C.to(masks.device)
    if reliability.exact:
        return Repaired(torch.ones(n, len(at_C), dtype=torch.bool, device=masks.device), 0)
    if isinstance(masks, CodedMasks):
        arrived_WC = masks.up(owner_C, redundancy_W) if up else masks.down(owner_C, redundancy_W)
    else:
        arrived_WC = masks.up(owner_C) if up else masks.down(owner_C)
    if reliability.budget >= 1.0:
        return Repaired(arrived_WC, 0)
    # In float64, as the engine counts: float32 would allow one chunk less at some budgets.
    allowed_N = torch.floor(reliability.budget * torch.bincount(at_C, minlength=n).double())
    fruitless = retransmitted = 0
    while fruitless < _PATIENCE:
        missing_WN = torch.zeros(n, n, device=arrived_WC.device)
        missing_WN.index_add_(1, at_C, (~arrived_WC).float())
        over_WN = missing_WN > allowed_N
        if not bool(over_WN.any()):
            return Repaired(arrived_WC, retransmitted)
        requested_WC = ~arrived_WC & over_WN[:, at_C]
        retransmitted += int(requested_WC.sum())
        received_WC = masks.retransmitted(requested_WC, up=up, owner_C=owner_C)
        fruitless = 0 if bool(received_WC.any()) else fruitless + 1
        arrived_WC |= received_WC
    raise ValueError(
        f"budget of {reliability.budget:g} cannot be met: some link loses all packets, retransmissions included; "
        "a budget of 1 sends no retransmissions"
    )

"""The arithmetic of the policies on plain tensors: a session applies it to one rank, the simulator to many at once.

W workers, C chunks, E elements of a chunk. Nothing here sends or waits.
"""

from typing import Any

import torch

from stormtorch import theory

MOST_LOSS = 0.9
"""Largest loss that leads and weights are computed from: those of a higher one would be mostly noise."""


def mean_of_arrived(sums_CE: torch.Tensor, count_C: torch.Tensor) -> torch.Tensor:
    """Divides each chunk's sum by the number of ranks that delivered it, in place. The owner's own always counts."""
    return sums_CE.div_(count_C.clamp(min=1).unsqueeze(-1))


def weighted_mean(sums_CE: torch.Tensor, weight_C: torch.Tensor, own_CE: torch.Tensor) -> torch.Tensor:
    """Divides each chunk's weighted sum by the weights of the ranks that delivered it.

    Args:
        sums_CE: Sum of what arrived, each rank's multiplied by its weight.
        weight_C: Sum of the weights of what arrived.
        own_CE: The owner's own, unweighted: the result where nothing that has a weight arrived.
    """
    weight_C1 = weight_C.unsqueeze(-1)
    return torch.where(weight_C1 > 0.0, sums_CE / weight_C1.clamp(min=1e-30), own_CE)


def inverse_probability_weight(loss: float | torch.Tensor) -> Any:
    """Factor that makes the sum of what arrives unbiased, for a sender that loses this fraction."""
    return 1.0 / (1.0 - (loss.clamp(max=MOST_LOSS) if isinstance(loss, torch.Tensor) else min(loss, MOST_LOSS)))


def share_of_all(count: float | torch.Tensor, present: int) -> Any:
    """Factor that turns the mean over what arrived into the mean over all ranks present: what is missing is zero."""
    return (count.float() if isinstance(count, torch.Tensor) else count) / present


def lead_for(factor: float, loss: float, max_lag: int | None = None) -> float:
    """Updates by which a broadcast is sent ahead.

    Args:
        factor: The policy's multiple of the mean lag.
        loss: Measured loss of the broadcast.
        max_lag: Bound on the ages of copies, which makes replicas lag less.
    """
    return factor * theory.lead(min(loss, MOST_LOSS), max_lag)


def parity_for(loss: float, chunks: int, compression_ratio: float) -> float:
    """Parity chunks for each data chunk: the least that leave little loss, within what a narrow wire pays for.

    Args:
        loss: Fraction of a rank's datagrams that was lost lately, before parity brought any back.
        chunks: Data chunks of its largest message.
        compression_ratio: Bytes of float32 over those of the wire.
    """
    most = theory.most_redundancy(chunks, compression_ratio)
    # In whole per cents: measured losses waver by that much anyway, and the same numbers are computed only once.
    return theory.least_redundancy(round(min(loss, MOST_LOSS), 2), chunks, most)


def residual_loss_ratio(loss: float, chunks: int, before: float, now: float) -> float:
    """Factor by which the loss that remains changes where a rank sends another redundancy.

    Without it, leads and weights would be those of the redundancy before for as long as meters remember: a training
    that begins on a lossy network learns in its first steps to send parity, and would then lead far too much.

    Args:
        loss: Fraction of the rank's datagrams that was lost lately, before parity brought any back.
        chunks: Data chunks of its largest message.
        before: Parity chunks for each data chunk, so far.
        now: Those to come.
    """
    p = round(min(loss, MOST_LOSS), 2)
    if before == now or p == 0.0:
        return 1.0
    left = [theory.residual_loss(p, chunks, each) for each in (before, now)]
    return left[1] / left[0]


def advance_ages(ages: torch.Tensor, arrived: torch.Tensor) -> None:
    """Adds a step to the ages of copies whose update was lost, and makes those that arrived new; in place."""
    ages.add_(1).masked_fill_(arrived, 0)


def overdue(ages: torch.Tensor, max_lag: int) -> torch.Tensor:
    """Whether each copy would exceed `max_lag` with another loss: such copies are fetched exactly."""
    return ages >= max_lag


def block_order(ranks: int, random: torch.Generator) -> list[int]:
    """Draws the rank that averages each block in a round of RPS, so that no block depends on one rank's links."""
    order: list[int] = torch.randperm(ranks, generator=random, device="cpu").tolist()
    return order

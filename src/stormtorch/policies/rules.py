"""Shared arithmetic of the policies on plain tensors: means, weights, leads, parity, ages of copies.

A session applies it to one rank, the simulator to many at once. C chunks, E elements of a chunk. No communication.
"""

from typing import Any

import torch

from stormtorch import theory

MOST_LOSS = 0.9
"""Higher losses count as this one for leads and weights, which would otherwise be mostly noise."""


def mean_of_arrived(sums_CE: torch.Tensor, count_C: torch.Tensor) -> torch.Tensor:
    """Divides each chunk's sum by the number of ranks that contributed, in place; the owner always does."""
    return sums_CE.div_(count_C.clamp(min=1).unsqueeze(-1))


def weighted_mean(sums_CE: torch.Tensor, weight_C: torch.Tensor, own_CE: torch.Tensor) -> torch.Tensor:
    """Divides each chunk's weighted sum by the weights of the ranks that contributed.

    Args:
        sums_CE: Sum of what arrived, each rank's multiplied by its weight.
        weight_C: Sum of the weights of what arrived.
        own_CE: The owner's own values, unweighted: the result if nothing with a weight arrived.
    """
    weight_C1 = weight_C.unsqueeze(-1)
    return torch.where(weight_C1 > 0.0, sums_CE / weight_C1.clamp(min=1e-30), own_CE)


def inverse_probability_weight(loss: float | torch.Tensor) -> Any:
    """Factor that makes the sum of arrivals unbiased, for a sender with this loss."""
    return 1.0 / (1.0 - (loss.clamp(max=MOST_LOSS) if isinstance(loss, torch.Tensor) else min(loss, MOST_LOSS)))


def share_of_all(count: float | torch.Tensor, present: int) -> Any:
    """Factor from the mean over arrivals to the mean over all ranks present, with missing ones as zero."""
    return (count.float() if isinstance(count, torch.Tensor) else count) / present


def lead_for(factor: float, loss: float, max_lag: int | None = None) -> float:
    """Updates by which a broadcast leads.

    Args:
        factor: The policy's multiple of the mean lag.
        loss: Measured loss of the broadcast.
        max_lag: Bound on the age of copies, which reduces the lag.
    """
    return factor * theory.lead(min(loss, MOST_LOSS), max_lag)


def parity_for(loss: float, chunks: int, compression_ratio: float) -> float:
    """Parity chunks per data chunk: the least that leave little loss, within the bytes that a narrow wire saves.

    Args:
        loss: Recent loss of a rank's datagrams, before decoding.
        chunks: Data chunks of its largest message.
        compression_ratio: Bytes of float32 over those of the wire.
    """
    most = theory.most_redundancy(chunks, compression_ratio)
    # In whole percent: measured losses vary by that much anyway, and results are cached.
    return theory.least_redundancy(round(min(loss, MOST_LOSS), 2), chunks, most)


def residual_loss_ratio(loss: float, chunks: int, before: float, now: float) -> float:
    """Ratio of the residual losses after and before a change of redundancy.

    It corrects the meters of loss at once. Otherwise leads and weights would follow the old redundancy for as long as
    the meters remember: a training on a lossy network adds parity in its first steps, and would then lead far too much.

    Args:
        loss: Recent loss of the rank's datagrams, before decoding.
        chunks: Data chunks of its largest message.
        before: Parity chunks per data chunk until now.
        now: Parity chunks per data chunk from now on.
    """
    p = round(min(loss, MOST_LOSS), 2)
    if before == now or p == 0.0:
        return 1.0
    left = [theory.residual_loss(p, chunks, each) for each in (before, now)]
    return left[1] / left[0]


def advance_ages(ages: torch.Tensor, arrived: torch.Tensor) -> None:
    """Adds a step to the age of copies whose update was lost, and resets those that arrived; in place."""
    ages.add_(1).masked_fill_(arrived, 0)


def overdue(ages: torch.Tensor, max_lag: int) -> torch.Tensor:
    """Whether each copy would exceed `max_lag` after another loss, so that it must be fetched exactly."""
    return ages >= max_lag


def block_order(ranks: int, random: torch.Generator) -> list[int]:
    """Draws the rank that averages each block in a round of RPS, so that no block depends on one rank's links."""
    order: list[int] = torch.randperm(ranks, generator=random, device="cpu").tolist()
    return order

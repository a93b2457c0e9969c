"""The arithmetic of the policies on plain tensors: trainings apply it to one rank, the simulator to many at once.

W workers, C chunks, E elements of a chunk. Nothing here sends or waits.
"""

from typing import Any

import torch

from stormtorch import theory

MOST_LOSS = 0.9
"""A measured loss above this would ask for a lead, or a weight, that only noise could have."""


def mean_of_arrived(sums_CE: torch.Tensor, count_C: torch.Tensor) -> torch.Tensor:
    """Each chunk's mean over the ranks that delivered it; in place. The owner's own always counts, so one at least."""
    return sums_CE.div_(count_C.clamp(min=1).unsqueeze(-1))


def chance_weight(loss: float | torch.Tensor) -> Any:
    """Factor that makes the sum of what arrives right on average, for a sender that loses this fraction."""
    return 1.0 / (1.0 - (loss.clamp(max=MOST_LOSS) if isinstance(loss, torch.Tensor) else min(loss, MOST_LOSS)))


def share_of_all(count: float | torch.Tensor, present: int) -> Any:
    """Factor that makes of a mean over what arrived one over all ranks present: what is missing counts as zero."""
    return (count.float() if isinstance(count, torch.Tensor) else count) / present


def lead_for(factor: float, loss: float, max_lag: int | None = None) -> float:
    """By how many updates a broadcast is ahead that loses so much, times the policy's factor: a bound on ages makes
    replicas lag less.
    """
    return factor * theory.lead(min(loss, MOST_LOSS), max_lag)


def grow_older(ages: torch.Tensor, arrived: torch.Tensor) -> None:
    """A copy whose update was lost is a step older, one that arrived is new; in place."""
    ages.add_(1).masked_fill_(arrived, 0)


def overdue(ages: torch.Tensor, max_lag: int) -> torch.Tensor:
    """Which copies another loss would make older than that: they are fetched exactly."""
    return ages >= max_lag


def block_order(ranks: int, random: torch.Generator) -> list[int]:
    """Which rank averages which block in a round of RPS: drawn anew, so that no block depends on one rank's links."""
    order: list[int] = torch.randperm(ranks, generator=random, device="cpu").tolist()
    return order

"""The arithmetic of the policies on plain tensors: trainings apply it to one rank, the simulator to many at once.

W workers, C chunks, E elements of a chunk. Nothing here sends or waits.
"""

import torch

from stormtorch import theory

MOST_LOSS = 0.9
"""A measured loss above this would ask for a lead, or a weight, that only noise could have."""


def mean_of_arrived(sums_CE: torch.Tensor, count_C: torch.Tensor) -> torch.Tensor:
    """Each chunk's mean over the ranks that delivered it; in place. The owner's own always counts, so one at least."""
    return sums_CE.div_(count_C.clamp(min=1).unsqueeze(-1))


def chance_weight(loss: float) -> float:
    """What a sender multiplies by where its copies are lost so often, so that their sum is right on average."""
    return 1.0 / (1.0 - min(loss, MOST_LOSS))


def chance_weights(losses: torch.Tensor) -> torch.Tensor:
    """The same of many links."""
    return 1.0 / (1.0 - losses.clamp(max=MOST_LOSS))


def share_of_all(count_C: torch.Tensor, present: int) -> torch.Tensor:
    """Makes of a mean over those that arrived one over all that are present: what is missing counts as zero."""
    return count_C.float() / present


def lead_for(factor: float, loss: float, max_lag: int | None = None) -> float:
    """By how many updates a broadcast is ahead that loses so much, times the policy's factor: a bound on ages makes
    replicas lag less.
    """
    return factor * theory.lead(min(loss, MOST_LOSS), max_lag)


def ahead(previous: torch.Tensor, current: torch.Tensor, lead: float | torch.Tensor) -> torch.Tensor:
    """Parameters ahead of what they are by `lead` times their last update; in the memory of the previous ones."""
    return previous.lerp_(current, 1.0 + lead)


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


def keep_where_lost(own: torch.Tensor, mean: torch.Tensor, arrived: torch.Tensor) -> None:
    """Where the mean of a block arrived it takes the place of one's own; in place. A flag for each element or row."""
    own.copy_(torch.where(arrived, mean, own))

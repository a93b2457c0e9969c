"""The lead if updates depend on the losses: gradient descent on a quadratic, each worker with its own replica."""

import pytest
import torch

from stormtorch import theory

pytestmark = pytest.mark.pure

LOSS, RATE, PLACES, STEPS, SETTLING = 0.4, 0.2, 500, 1500, 300


def errors(workers: int, lead: float, target: float = 0.0) -> tuple[float, float]:
    """Mean error of replicas at the first steps, in the last update; then their mean square, in updates squared."""
    random = torch.Generator().manual_seed(workers)
    owner = torch.full((PLACES,), target)
    error_WP = torch.zeros(workers, PLACES)
    lags, squares, updates = [], 0.0, 0.0
    for step in range(STEPS):
        noise = torch.randn(PLACES, generator=random)
        update = -RATE * ((owner + error_WP).mean(0) + noise)
        owner = owner + update
        arrived_WP = torch.rand(workers, PLACES, generator=random) > LOSS
        error_WP = torch.where(arrived_WP, lead * update, error_WP - update)
        if 5 <= step < 20:
            lags.append(float(error_WP.mean() / update.mean()))
        if step >= SETTLING:
            squares += float(error_WP.square().mean())
            updates += float(update.square().mean())
    return sum(lags) / len(lags), squares / updates


def test_replicas_are_right_on_average_although_updates_depend_on_what_was_lost() -> None:
    # From far away all updates go the same way at first, so that a lag shows.
    assert abs(errors(64, theory.lead(LOSS), target=100.0)[0]) < 0.02
    assert errors(64, 0.0, target=100.0)[0] < -0.5


@pytest.mark.parametrize("workers, least, most", [(1, 1.25, 1.40), (4, 1.03, 1.12), (64, 0.98, 1.02)])
def test_a_replica_is_as_far_off_as_theory_says_where_it_is_one_of_many(
    workers: int, least: float, most: float
) -> None:
    exact = theory.owner_drift(LOSS, lead=theory.lead(LOSS))
    # What one worker lost turns its own next gradient, and so the update: a share of 1 / workers.
    assert least < errors(workers, theory.lead(LOSS))[1] / exact < most

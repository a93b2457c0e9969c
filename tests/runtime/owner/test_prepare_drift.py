# mypy: disable-error-code="no-untyped-call"
# torch's own backward is untyped.
"""Drift under loss, on the simulated network: it is what theory says, the lead corrects it, and the lag is bounded."""

from typing import Any

import pytest
import torch

from stormtorch import BoundedDrift, Options, theory
from stormtorch.collectives.formats.grid import GRIDS
from stormtorch.telemetry.statistics import mean
from training import (
    WORLD,
    Optimizer,
    Rank,
    Vector,
    on_ranks,
)

pytestmark = pytest.mark.pure

SMALL: dict[str, Any] = {"options": Options(datagram_bytes=400)}


class RandomWalk(Optimizer):
    """Adds noise of variance 1 to its shards, whatever the gradients are: the updates that theory assumes."""

    def __init__(self, params: Any, seed: int) -> None:
        super().__init__(params, {})
        self.random = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as users write it
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(torch.randn(parameter.shape, generator=self.random))


def walk(p: float, steps: int, policy: BoundedDrift) -> list[tuple[list[torch.Tensor], Any]]:
    """Every rank's replica at each step, and its ledger."""
    count = 6000
    made = iter(range(WORLD))

    def work(rank: Rank) -> tuple[list[torch.Tensor], Any]:
        replicas = []
        for _ in range(steps):
            rank.model(torch.ones(1)).backward()
            rank.optimizer.step()
            rank.optimizer.zero_grad()
            replicas.append(rank.model.numbers.detach().clone())
        rank.values()
        return replicas, rank.optimizer.ledger

    make = lambda model: RandomWalk(model.parameters(), next(made))  # noqa: E731
    return on_ranks(Vector(count), make, work, policy=policy, loss=p, **SMALL)


@pytest.mark.thorough
@pytest.mark.parametrize("p", [0.1, 0.3])
def test_drift_of_independent_updates_is_what_theory_says(p: float) -> None:
    steps, begin = 70, 12
    policy = BoundedDrift(lead=0.0, ownership="elements", overlap=False, guard=None, drift_samples=1024)
    found = walk(p, steps, policy)
    shard = 6000 // WORLD
    pairs, owners = [], []
    for step in range(begin, steps):
        replicas = torch.stack([ours[step] for ours, _ in found])
        for owner in range(WORLD):
            copies = replicas[:, owner * shard : (owner + 1) * shard]
            others = [rank for rank in range(WORLD) if rank != owner]
            owners += [(copies[rank] - copies[owner]).square().mean().item() for rank in others]
            pairs += [(copies[a] - copies[b]).square().mean().item() for a in others for b in others if a < b]
    assert mean(pairs) == pytest.approx(theory.pair_drift(p), rel=0.15)
    assert mean(owners) == pytest.approx(theory.owner_drift(p), rel=0.15)
    rows = [row for _, ledger in found for row in list(ledger)[begin:]]
    assert mean([row.pair_drift for row in rows]) == pytest.approx(theory.pair_drift(p), rel=0.15)
    assert mean([row.owner_drift for row in rows]) == pytest.approx(theory.owner_drift(p), rel=0.15)
    assert mean([row.update_variance for row in rows]) == pytest.approx(1.0, rel=0.05)
    assert mean([row.pair_bound for row in rows]) == pytest.approx(theory.pair_bound(p), rel=0.15)
    assert mean([row.published_bound for row in rows]) == pytest.approx(theory.pair_drift_published(p), rel=0.15)
    assert all(row.lead == 0.0 for row in rows)
    assert mean([1.0 - mean(list(row.broadcast.values())) for row in rows]) == pytest.approx(p, rel=0.1)
    assert mean([1.0 - mean(list(row.gradients.values())) for row in rows]) == pytest.approx(p, rel=0.1)
    sizes = {age: sum(row.lag.get(age, 0) for row in rows) for age in range(4)}
    for age in range(3):  # with each step of age, the number of copies falls by the loss
        if sizes[age] > 500:  # smaller counts are mostly noise
            assert sizes[age + 1] / sizes[age] == pytest.approx(p, rel=0.25)


@pytest.mark.slow
@pytest.mark.parametrize("max_lag", [None, 1])
@pytest.mark.parametrize("p", [0.1, 0.3])
def test_drift_with_the_lead_is_within_the_bound_of_that_policy(p: float, max_lag: int | None) -> None:
    found = walk(p, 70, BoundedDrift(ownership="elements", guard=None, max_lag=max_lag, drift_samples=1024))
    rows = [row for _, ledger in found for row in list(ledger)[12:]]
    drift, bound = mean([row.pair_drift for row in rows]), mean([row.pair_bound for row in rows])
    assert 0.8 * bound < drift < 1.1 * bound
    assert bound == pytest.approx(theory.pair_bound(p, lead=theory.lead(p, max_lag), max_lag=max_lag), rel=0.15)
    assert drift > mean([row.published_bound for row in rows])


def test_the_bound_holds_in_the_first_steps_too() -> None:
    """The first steps have the largest updates, and their measured loss is still too small because of its prior."""
    found = walk(0.1, 5, BoundedDrift(ownership="elements", guard=None, drift_samples=4096))
    rows = [row for _, ledger in found for row in list(ledger)[1:]]
    assert mean([row.pair_drift for row in rows]) < 1.1 * mean([row.pair_bound for row in rows])


@pytest.mark.parametrize("p", [0.1, 0.3])
def test_the_lead_is_the_mean_lag_at_the_measured_loss(p: float) -> None:
    found = walk(p, 40, BoundedDrift(ownership="elements", guard=None))
    rows = [row for _, ledger in found for row in list(ledger)[10:]]
    for row in rows:
        assert row.lead == pytest.approx(theory.lead(row.loss))
    assert mean([row.lead for row in rows]) == pytest.approx(theory.lead(p), rel=0.1)


def test_where_ages_have_a_bound_the_lead_is_as_long_as_copies_then_lag() -> None:
    found = walk(0.3, 30, BoundedDrift(ownership="elements", guard=None, max_lag=1))
    rows = [row for _, ledger in found for row in list(ledger)[10:]]
    for row in rows:
        assert row.lead == pytest.approx(theory.lead(row.loss, 1))
    copies = sum(sum(row.lag.values()) for row in rows)
    lag = sum(age * count for row in rows for age, count in row.lag.items()) / copies
    assert mean([row.lead for row in rows]) == pytest.approx(lag, rel=0.1)


def bias(lead: float) -> float:
    """How far replicas are behind the owners where all updates are 1, in updates."""

    class Steady(Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                if parameter.grad is not None:
                    parameter.add_(1.0)

    def work(rank: Rank) -> float:
        lags = []
        for step in range(60):
            rank.model(torch.ones(1)).backward()
            rank.optimizer.step()
            rank.optimizer.zero_grad()
            if step >= 20:
                copies = rank.model.numbers.detach()
                lags.append(float((step + 1) * 4 / 3 - copies.mean() * 4 / 3))  # the owned quarter does not lag
        return mean(lags)

    policy = BoundedDrift(lead=lead, ownership="elements", overlap=False, guard=None)
    return mean(
        on_ranks(Vector(6000), lambda model: Steady(model.parameters(), {}), work, policy=policy, loss=0.3, **SMALL)
    )


@pytest.mark.thorough
def test_with_the_lead_replicas_are_right_on_average() -> None:
    assert bias(0.0) == pytest.approx(theory.owner_drift(0.3), rel=0.1)
    assert abs(bias(1.0)) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [True, False])
def test_no_copy_is_older_than_the_bound(overlap: bool) -> None:
    ages = {}
    for bound in (None, 4):
        found = walk(0.3, 40, BoundedDrift(max_lag=bound, guard=None, ownership="elements", overlap=overlap))
        ages[bound] = max(max(row.lag) for _, ledger in found for row in ledger)
        assert any(row.fetched for _, ledger in found for row in ledger) == (bound is not None)
    assert ages[None] > 4
    assert ages[4] == 4


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16, *GRIDS], ids=str)
def test_what_was_fetched_is_what_the_owner_sent(wire: torch.dtype) -> None:
    policy = BoundedDrift(max_lag=1, guard=None, ownership="elements", overlap=False, lead=0.0, wire=wire)
    found = walk(0.3, 20, policy)
    # With a bound of 1, what was lost before is fetched now: no copy is further from its owner than its last two steps.
    for step in range(5, 20):
        owners = torch.cat([found[owner][0][step][owner * 1500 : (owner + 1) * 1500] for owner in range(WORLD)])
        for ours, _ in found:
            assert (ours[step] - owners).abs().max() < 6.0

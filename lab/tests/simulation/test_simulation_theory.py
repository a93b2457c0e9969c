"""Theory of lag, drift, gradients and mixing, against simulations that meet its assumptions.

Updates are independent: the loss is linear, so its gradient is the data, and plain descent at rate 1 applies it.
Intervals of 3 % are wide for what is averaged here and narrow for any other formula.
"""

import functools
from typing import Any

import pytest
import torch
from torch import nn

from mask_statistics import within
from simulating import Data, keep_trainings, outcome, replicas_of
from stormtorch import EXACT, BoundedDrift, GradientAveraging, ModelAveraging, _engine, theory
from stormtorch.policies.policy import Policy
from stormtorch.telemetry.ledger import LedgerRow
from stormtorch.telemetry.statistics import mean
from stormtorch_lab.simulation.run import DATAGRAM_BYTES
from training import Optimizer, Vector

pytestmark = pytest.mark.pure

WORKERS = 8
CHUNKS = 240
COUNT = CHUNKS * _engine.chunk_bytes(DATAGRAM_BYTES, False) // 4
WARMUP = 15
STEPS = 65


@functools.lru_cache(maxsize=2 * WORKERS)
def noise(rank: int, step: int) -> torch.Tensor:
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(1000 * step + rank))


def ones(rank: int, step: int) -> torch.Tensor:
    return -torch.ones(1)


def inner(model: nn.Module, given: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(given)
    return found


def descent(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


def walk(p: float, policy: Policy, data: Data = noise, *, steps: int = STEPS, **more: Any) -> list[LedgerRow]:
    """The rows of a walk, all of them."""
    task: dict[str, Any] = {"objective": inner, "data": data, "workers": WORKERS, "network": p, "policy": policy}
    return list(outcome(Vector(COUNT), descent, steps, **{**task, **more})[0].ledger)


def only_the_broadcast_loses(**settings: Any) -> BoundedDrift:
    return BoundedDrift(**{"gradients": EXACT, "guard": None, "drift_samples": 8000, "lead": 0.0, **settings})


def drifts(rows: list[LedgerRow]) -> tuple[float, float]:
    """Pair and owner drift over the variance of an update, in the long run."""
    rows = rows[WARMUP:]
    variance = mean([row.update_variance or 0.0 for row in rows])
    pair, owner = (mean([getattr(row, name) for row in rows]) for name in ("pair_drift", "owner_drift"))
    return pair / variance, owner / variance


# --- lag --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("p", "max_lag"), [(0.1, None), (0.4, None), (0.4, 1), (0.3, 3), (0.6, 4)])
def test_copies_are_as_old_as_theory_says(p: float, max_lag: int | None) -> None:
    # Rows that are far apart know nothing of each other: copies are then independent.
    rows = walk(p, only_the_broadcast_loses(max_lag=max_lag, drift_samples=0), ones, steps=200)[20::20]
    copies = sum(sum(row.lag.values()) for row in rows)
    assert copies == len(rows) * (WORKERS - 1) * CHUNKS
    for age in range(7):
        chance = theory.lag_probability(age, p, max_lag)
        found = sum(row.lag.get(age, 0) for row in rows) / copies
        assert within(found, chance, (chance * (1.0 - chance) / copies) ** 0.5), (age, found, chance)
    fetched = theory.fetched(p, max_lag)
    found = sum(row.fetched for row in rows) / copies
    assert within(found, fetched, (fetched * (1.0 - fetched) / copies) ** 0.5)


@pytest.mark.thorough
def test_the_oldest_copy_is_as_old_as_theory_says() -> None:
    policy = only_the_broadcast_loses(drift_samples=0)
    oldest = [max(max(row.lag) for row in walk(0.3, policy, ones, steps=25, seed=seed)) for seed in range(12)]
    # The standard deviation of one is about 1.
    assert mean(list(map(float, oldest))) == pytest.approx(theory.largest_lag(0.3, 7 * CHUNKS, 25), abs=0.8)


# --- drift ------------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("p", [0.1, 0.2, 0.4])
def test_drift_of_independent_updates_is_the_exact_one(p: float) -> None:
    pair, owner = drifts(walk(p, only_the_broadcast_loses()))
    assert pair == pytest.approx(theory.pair_drift(p), rel=0.03)
    assert owner == pytest.approx(theory.owner_drift(p), rel=0.03)
    assert owner - pair / 2 == pytest.approx(theory.common_drift(p), abs=0.03 * owner)
    assert pair > (1.0 + p / 2) * theory.pair_drift_published(p)  # which is too small by the fraction p


@pytest.mark.thorough
@pytest.mark.parametrize("p", [0.1, 0.4])
def test_with_the_lead_replicas_are_further_from_each_other_and_have_no_error_in_common(p: float) -> None:
    pair, owner = drifts(walk(p, only_the_broadcast_loses(lead=1.0)))
    lead = theory.lead(p)
    assert pair == pytest.approx(theory.pair_drift(p, lead=lead), rel=0.03)
    assert owner == pytest.approx(theory.owner_drift(p, lead=lead), rel=0.03)
    assert abs(owner - pair / 2) < 0.03 * owner
    assert theory.common_drift(p, lead=lead) == 0.0


@pytest.mark.thorough
@pytest.mark.parametrize(("p", "max_lag"), [(0.2, 1), (0.4, 1), (0.4, 3)])
def test_bounded_drift_is_as_theory_says(p: float, max_lag: int) -> None:
    pair, owner = drifts(walk(p, only_the_broadcast_loses(max_lag=max_lag)))
    assert pair == pytest.approx(theory.pair_drift(p, max_lag=max_lag), rel=0.03)
    assert owner == pytest.approx(theory.owner_drift(p, max_lag=max_lag), rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("lead", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("p", [0.1, 0.4])
def test_a_mean_update_adds_what_theory_says(p: float, lead: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """All updates are 1, so that drift is the mean's part alone."""
    made, behind = keep_trainings(monkeypatch), []

    def look(spot: Any) -> None:
        if spot.step > WARMUP:
            away = replicas_of(made[0]) - spot.step
            behind.append(-float(away.mean()) * WORKERS / (WORKERS - 1))  # owners are not behind

    rows = walk(p, only_the_broadcast_loses(lead=lead), ones, advance=look)[WARMUP:]
    ahead = lead * theory.lead(p)
    large = 1e9  # so that nothing of the noise is left
    for name, formula in (("pair_drift", theory.pair_drift), ("owner_drift", theory.owner_drift)):
        found = mean([getattr(row, name) for row in rows])
        assert found == pytest.approx(formula(p, mean_squared=large, lead=ahead) / large, rel=0.04)
    assert mean(behind) == pytest.approx(theory.mean_lag(p) - ahead, abs=0.015)
    assert mean([row.lead for row in rows]) == pytest.approx(ahead, rel=0.05)


@pytest.mark.thorough
def test_bounded_drift_stays_and_the_drift_of_averaged_gradients_grows_with_every_step() -> None:
    policies: list[Policy] = [only_the_broadcast_loses(), GradientAveraging()]
    for policy, growth in zip(policies, (1.0, 4.0), strict=True):
        rows = walk(0.2, policy, steps=88)
        early, late = (mean([row.pair_drift or 0.0 for row in rows[at - 8 : at + 8]]) for at in (20, 80))
        assert late / early == pytest.approx(growth, rel=0.2)


# --- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("p", "workers"), [(0.1, 8), (0.4, 8), (0.4, 2)])
def test_lost_gradients_add_the_variance_that_theory_says(p: float, workers: int) -> None:
    rows = walk(p, BoundedDrift(broadcast=EXACT, drift_samples=20000), steps=20, workers=workers)
    inflation = theory.variance_inflation(p, workers)
    assert mean([row.variance_inflation for row in rows]) == pytest.approx(inflation, rel=0.015)
    assert mean([row.update_variance or 0.0 for row in rows]) * workers == pytest.approx(inflation, rel=0.02)
    assert mean([row.effective_batch for row in rows]) == pytest.approx(1.0 - p * (workers - 1) / workers, rel=0.01)


@pytest.mark.thorough
@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_weights_by_chance_pay_for_the_mean_what_theory_says(shift: float) -> None:
    p = 0.3
    policy = BoundedDrift(broadcast=EXACT, weights="horvitz-thompson", drift_samples=20000)
    rows = walk(p, policy, lambda rank, step: noise(rank, step) + shift, steps=60)[30:]
    found = (mean([row.update_variance or 0.0 for row in rows]) - shift**2) * WORKERS
    assert found == pytest.approx(theory.horvitz_thompson_inflation(p, WORKERS, shift**2), rel=0.04)


# --- averaged models --------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("p", [0.1, 0.4])
@pytest.mark.parametrize("workers", [4, 8])
def test_averaged_models_come_together_as_their_mixing_constants_say(
    p: float, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise of variance 1 enters every model and every round leaves a1 - a2 of what they are apart."""
    made, apart = keep_trainings(monkeypatch), []
    walk(p, ModelAveraging(), steps=40, workers=workers, advance=lambda spot: apart.append(made[0].drift()))
    a1, a2 = theory.mixing(p, workers)
    left = a1 - a2
    assert mean(apart[10:]) == pytest.approx(2 * left / (1.0 - left), rel=0.04)


@pytest.mark.parametrize(("workers", "p"), [(4, 0.1), (4, 0.4), (8, 0.4)])
def test_a_round_moves_the_mean_of_models_by_a2(workers: int, p: float) -> None:
    task: dict[str, Any] = {"objective": inner, "data": noise, "workers": workers, "policy": ModelAveraging()}
    before = -torch.stack([noise(rank, 0) for rank in range(workers)]).mean(0)
    moved = []
    for seed in range(8):
        _, found = outcome(Vector(COUNT), descent, 1, network=p, seed=seed, **task)
        moved.append(float((found.get_parameter("numbers").detach() - before).square().mean()))
    _, a2 = theory.mixing(p, workers)
    assert mean(moved) * workers == pytest.approx(a2 * (workers - 1), rel=0.06)

# mypy: disable-error-code="no-untyped-call"
# torch's own backward is untyped.
"""The measured loss: few chunks cannot shout, many are believed at once, and the guard measures on."""

import itertools
import random
from typing import Any

import pytest
import torch
from torch import nn

from stormtorch import EXACT, LOSSY, BoundedDrift, Options, Reliability, theory
from stormtorch.policies import rules
from stormtorch.policies.guard import Guard, LossMeter
from stormtorch.results.statistics import mean
from training import Rank, adamw, on_ranks, perceptron

pytestmark = pytest.mark.pure

SMALL: dict[str, Any] = {"options": Options(datagram_bytes=400)}


def rows(rank: Rank) -> list[Any]:
    rank.values()
    return list(rank.optimizer.ledger)


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(8, 6)


# --- on the simulated network -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("guard", [0.5, None])
def test_a_small_model_is_neither_guarded_nor_far_ahead_because_a_datagram_is_lost(guard: float | None) -> None:
    def work(rank: Rank) -> list[Any]:
        rank.train(25)
        return rows(rank)

    for seed in range(8):
        policy = BoundedDrift(guard=guard)
        for found in on_ranks(linear(), adamw, work, world=2, policy=policy, loss=0.1, seed=seed):
            assert not any(row.guarded for row in found)
            assert max(row.lead for row in found) < 0.5
            # One chunk per step and rank: as many losses in a row make no longer lead than this.
            for number, row in enumerate(found, 1):
                assert row.lead <= number / 20


@pytest.mark.parametrize("gradients", [LOSSY, EXACT], ids=["lossy", "exact"])
def test_the_loss_is_measured_while_the_guard_repairs(gradients: Reliability) -> None:
    def work(rank: Rank) -> list[Any]:
        rank.train(60)
        return rows(rank)

    policy = BoundedDrift(gradients=gradients, guard=0.2)
    for found in on_ranks(perceptron(inside=200), adamw, work, policy=policy, loss=0.3, **SMALL):
        guarded = [row for row in found[10:] if row.guarded]
        assert len(guarded) == 50
        assert len({row.loss for row in guarded}) > 25
        # Where gradients are repaired, what is sent again tells, and reports that were lost make it too much.
        assert 0.25 < guarded[-1].loss < (0.35 if gradients is LOSSY else 0.5)


def test_several_backwards_of_a_step_count_its_broadcast_once() -> None:
    def work(rank: Rank) -> list[float]:
        for step in range(12):
            for part in range(4):
                given = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + 10 * part + rank.rank))
                rank.model(given).square().mean().backward()
            rank.optimizer.step()
            rank.optimizer.zero_grad()
        return [row.loss for row in rows(rank)]

    for losses in on_ranks(linear(), adamw, work, world=2, policy=BoundedDrift(), loss=0.3):
        for before, after in itertools.pairwise(losses):
            assert after - before < 1 / 20  # one chunk was told of


# --- the meter and the guard ------------------------------------------------------------------------------------------


def lost_of(chunks: int, p: float, chance: random.Random) -> int:
    return sum(chance.random() < p for _ in range(chunks)) if chunks < 100 else round(p * chunks)


@pytest.mark.parametrize("chunks", [1, 3, 30])
def test_few_chunks_come_to_the_true_loss_and_do_not_alarm(chunks: int) -> None:
    found = []
    for seed in range(20):
        chance = random.Random(seed)
        meter, guard = LossMeter(0.0), Guard(0.5, None)
        for step in range(1000):
            lost = lost_of(chunks, 0.1, chance)
            meter.add(lost, chunks)
            guard.watch(lost, chunks, 0)
            assert not guard.alarm
            if step == 200:
                found.append(meter.value)
    assert all(0.04 < value < 0.16 for value in found)
    assert mean(found) == pytest.approx(0.1, rel=0.12)


@pytest.mark.parametrize(("chunks", "within"), [(1, 120), (10, 12), (100, 4), (5000, 4)])
def test_an_outage_alarms_as_soon_as_there_is_evidence(chunks: int, within: int) -> None:
    guard, chance = Guard(0.5, None), random.Random(1)
    for _ in range(600):
        guard.watch(lost_of(chunks, 0.05, chance), chunks, 0)
    assert not guard.alarm
    for _ in range(within):
        guard.watch(chunks, chunks, 0)
    assert guard.alarm


def test_the_alarm_ends_when_the_network_is_well_again() -> None:
    guard = Guard(0.5, None)
    for _ in range(20):
        guard.watch(1000, 1000, 0)
    alarms = [guard.alarm]
    while alarms[-1] and len(alarms) < 30:
        guard.watch(0, 1000, 0)
        alarms.append(guard.alarm)
    assert 10 <= sum(alarms) <= 25


def test_nothing_lost_is_no_loss_and_no_lead() -> None:
    meter = LossMeter(0.0)
    assert meter.value == 0.0
    meter.add(0, 1)
    assert meter.value == 0.0
    assert rules.lead_for(1.0, meter.value) == 0.0


def test_many_links_are_measured_as_one_is() -> None:
    one = [LossMeter(0.0), LossMeter(0.0)]
    both = LossMeter(torch.zeros(2, dtype=torch.float64))
    sent = (3, 700)
    for step in range(50):
        lost = (step % 2, 70 + step)
        for meter, few, all_of in zip(one, lost, sent, strict=True):
            meter.add(few, all_of)
        both.add(torch.tensor(lost, dtype=torch.float64), torch.tensor(sent, dtype=torch.float64))
    assert both.value.tolist() == pytest.approx([meter.value for meter in one])


def test_many_chunks_are_believed_at_once() -> None:
    meter = LossMeter(0.0)
    meter.add(300, 3000)
    assert rules.lead_for(1.0, meter.value) == pytest.approx(theory.lead(0.1), rel=0.02)

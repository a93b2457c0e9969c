"""Loss meter and convergence guard: few chunks raise no alarm, many raise it at once, and an alarm is held."""

import math
import random
from collections.abc import Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stormtorch import theory
from stormtorch.policies import rules
from stormtorch.policies.convergence_guard import ConvergenceGuard, LossMeter

pytestmark = pytest.mark.pure

HOLD = 20
"""Steps for which an alarm lasts at least."""


def lost_of(chunks: int, p: float, chance: random.Random) -> int:
    return sum(chance.random() < p for _ in range(chunks)) if chunks < 100 else round(p * chunks)


def watched(guard: ConvergenceGuard, steps: Iterable[tuple[float, float, int]]) -> list[bool]:
    """Whether the guard was alarmed after each step of (lost, sent, oldest)."""
    alarms = []
    for lost, sent, oldest in steps:
        guard.watch(lost, sent, oldest)
        alarms.append(guard.alarm)
    return alarms


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# --- the meter --------------------------------------------------------------------------------------------------------


def test_nothing_lost_is_no_loss_and_no_lead() -> None:
    meter = LossMeter(0.0)
    assert meter.value == 0.0
    meter.add(0, 1)
    assert meter.value == 0.0
    assert rules.lead_for(1.0, meter.value) == 0.0


def test_the_first_chunks_weigh_little_beside_those_that_count_as_arrived() -> None:
    meter = LossMeter(0.0)
    for losses in range(1, 10):
        meter.add(1, 1)
        assert meter.value <= losses / 20


def test_many_chunks_are_believed_at_once() -> None:
    meter = LossMeter(0.0)
    meter.add(300, 3000)
    assert rules.lead_for(1.0, meter.value) == pytest.approx(theory.lead(0.1), rel=0.02)


def test_without_chunks_that_count_as_arrived_the_first_ones_are_all_that_is_known() -> None:
    meter = LossMeter(0.0, prior=0.0)
    with pytest.raises(ZeroDivisionError):
        _ = meter.value
    meter.add(3, 4)
    assert meter.value == 0.75


@pytest.mark.parametrize("chunks", [1, 5, 24, 25, 26, 400, 10_000])
def test_counts_are_kept_for_20_steps_and_in_any_case_of_500_chunks(chunks: int) -> None:
    meter = LossMeter(0.0)
    for _ in range(6000):
        meter.add(0, chunks)
    _, counted = meter.state
    assert counted == pytest.approx(max(20 * chunks, 500), rel=1e-4)


def test_the_meter_forgets_as_it_was_told_to() -> None:
    meter = LossMeter(0.0, steps=4, chunks=100, prior=0.0)
    meter.add(50, 50)  # of 100 chunks, half: the limit of 4 steps holds
    meter.add(0, 50)
    assert meter.state == (50 - 50 / 4, 50 - 50 / 4 + 50)
    meter = LossMeter(0.0, steps=4, chunks=100, prior=0.0)
    meter.add(10, 10)  # a tenth of 100 chunks is less than a quarter
    meter.add(0, 10)
    assert meter.state == (9, 19)


def test_a_change_of_the_loss_is_followed_within_what_is_remembered() -> None:
    meter = LossMeter(0.0)
    for _ in range(200):
        meter.add(300, 1000)
    assert meter.value == pytest.approx(0.3, rel=0.01)
    for _ in range(60):
        meter.add(50, 1000)
    assert meter.value == pytest.approx(0.05 + 0.25 * 0.95**60, rel=0.01)


def test_the_value_lies_between_the_least_and_the_most_that_was_measured() -> None:
    chance = random.Random(3)
    meter = LossMeter(0.0)
    for _ in range(500):
        sent = chance.choice([0, 1, 7, 3000])
        meter.add(chance.uniform(0, sent), sent)
        assert 0.0 <= meter.value <= 1.0


def test_many_links_are_measured_as_one_is() -> None:
    one = [LossMeter(0.0), LossMeter(0.0)]
    both = LossMeter(torch.zeros(2, dtype=torch.float64))
    sent = (3, 700)
    for step in range(50):
        lost = (step % 2, 70 + step)
        for meter, few, all_of in zip(one, lost, sent, strict=True):
            meter.add(few, all_of)
        both.add(tensor(*lost), tensor(*sent))
    assert both.value.tolist() == pytest.approx([meter.value for meter in one])


def test_links_do_not_mix_and_the_zeros_that_were_given_stay_zeros() -> None:
    zeros = torch.zeros(2, dtype=torch.float64)
    meter = LossMeter(zeros)
    for _ in range(100):
        meter.add(tensor(0, 50), tensor(100, 100))
    assert meter.value[0] == 0.0
    assert meter.value[1] == pytest.approx(0.5, rel=0.01)
    assert zeros.tolist() == [0.0, 0.0]


def test_a_meter_goes_on_from_a_state() -> None:
    one, other = LossMeter(0.0), LossMeter(0.0)
    one.add(30, 100)
    other.restore(*one.state)
    for meter in (one, other):
        meter.add(5, 100)
    assert other.state == one.state


# --- the guard --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [1, 3, 30])
def test_few_chunks_come_to_the_true_loss_and_do_not_alarm(chunks: int) -> None:
    found = []
    for seed in range(20):
        chance = random.Random(seed)
        meter, guard = LossMeter(0.0), ConvergenceGuard(0.5, None)
        for step in range(1000):
            lost = lost_of(chunks, 0.1, chance)
            meter.add(lost, chunks)
            guard.watch(lost, chunks, 0)
            assert not guard.alarm
            if step == 200:
                found.append(meter.value)
    assert all(0.04 < value < 0.16 for value in found)
    assert math.fsum(found) / len(found) == pytest.approx(0.1, rel=0.12)


@pytest.mark.parametrize(("chunks", "within"), [(1, 120), (10, 12), (100, 4), (5000, 4)])
def test_an_outage_alarms_as_soon_as_there_is_evidence(chunks: int, within: int) -> None:
    guard, chance = ConvergenceGuard(0.5, None), random.Random(1)
    for _ in range(600):
        guard.watch(lost_of(chunks, 0.05, chance), chunks, 0)
    assert not guard.alarm
    for _ in range(within):
        guard.watch(chunks, chunks, 0)
    assert guard.alarm


def test_the_latest_chunks_alarm_before_the_long_memory_does() -> None:
    guard, slow = ConvergenceGuard(0.5, None), LossMeter(0.0)
    for _ in range(100):
        guard.watch(0, 5000, 0)
        slow.add(0, 5000)
    steps = 0
    while not guard.alarm:
        guard.watch(5000, 5000, 0)
        slow.add(5000, 5000)
        steps += 1
    assert steps <= 4
    assert slow.value < 0.25


def test_the_latest_chunks_alarm_only_by_more_than_chance_explains() -> None:
    # About 100 chunks are the quick memory: three standard errors of a loss of 0.5 are 0.15.
    guard, quick = ConvergenceGuard(0.5, None), LossMeter(0.0, steps=4, chunks=100)
    for _ in range(40):
        guard.watch(0, 30, 0)
        quick.add(0, 30)
    highest = 0.0
    while not guard.alarm:
        highest = max(highest, quick.value)
        guard.watch(23, 30, 0)
        quick.add(23, 30)
    assert highest > 0.5
    assert quick.value > 0.6


def test_loss_just_below_the_limit_does_not_alarm_and_just_above_does() -> None:
    assert not any(watched(ConvergenceGuard(0.3, None), [(290, 1000, 0)] * 500))
    assert watched(ConvergenceGuard(0.3, None), [(310, 1000, 0)] * 500)[-1]


def test_without_a_limit_nothing_alarms() -> None:
    assert not any(watched(ConvergenceGuard(None, 1), [(1000, 1000, 99)] * 50))


def test_a_copy_that_is_too_old_alarms_although_nothing_is_lost() -> None:
    guard = ConvergenceGuard(0.5, 8)
    assert watched(guard, [(0, 1000, 8)] * 30) == [False] * 30
    assert watched(guard, [(0, 1000, 9)]) == [True]


def test_copies_may_be_of_any_age_where_no_age_was_given() -> None:
    assert not any(watched(ConvergenceGuard(0.5, None), [(0, 1000, 10_000)] * 30))


def test_an_alarm_holds_for_20_steps_and_ends_when_all_is_well() -> None:
    guard = ConvergenceGuard(0.5, 8)
    watched(guard, [(0, 1000, 9)])
    assert watched(guard, [(0, 1000, 0)] * 30) == [True] * (HOLD - 1) + [False] * (30 - HOLD + 1)


def test_an_alarm_does_not_end_while_copies_are_too_old() -> None:
    guard = ConvergenceGuard(0.5, 8)
    assert all(watched(guard, [(0, 1000, 9)] * 50))
    assert watched(guard, [(0, 1000, 8)]) == [False]


def test_the_alarm_ends_when_the_network_is_well_again() -> None:
    guard = ConvergenceGuard(0.5, None)
    watched(guard, [(1000, 1000, 0)] * 20)
    alarms = [guard.alarm, *watched(guard, [(0, 1000, 0)] * 30)]
    assert 10 <= sum(alarms) <= 25
    assert alarms == sorted(alarms, reverse=True)


def test_an_alarm_ends_only_when_loss_is_a_tenth_below_the_limit() -> None:
    guard = ConvergenceGuard(0.5, None)
    watched(guard, [(1000, 1000, 0)] * 20)
    assert all(watched(guard, [(460, 1000, 0)] * 300))  # or it would come and go
    assert not watched(guard, [(440, 1000, 0)] * 300)[-1]


def test_a_second_outage_alarms_again_and_holds_as_long() -> None:
    guard = ConvergenceGuard(0.5, 8)
    for _ in range(2):
        assert watched(guard, [(0, 1000, 9)]) == [True]
        assert sum(watched(guard, [(0, 1000, 0)] * 40)) == HOLD - 1


STEPS = st.lists(
    st.tuples(st.integers(0, 400), st.integers(1, 400), st.integers(0, 4)).map(
        lambda step: (min(step[:2]), max(step[:2]), step[2])
    ),
    max_size=60,
)


@given(before=STEPS, after=STEPS)
def test_a_guard_goes_on_from_a_state_as_if_nothing_had_happened(
    before: list[tuple[float, float, int]], after: list[tuple[float, float, int]]
) -> None:
    one, other = ConvergenceGuard(0.4, 3), ConvergenceGuard(0.4, 3)
    watched(one, before)
    other.restore(*one.state)
    assert other.alarm == one.alarm
    assert watched(other, after) == watched(one, after)
    assert other.state == one.state

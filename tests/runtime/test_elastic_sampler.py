"""ElasticSampler: every sample once per epoch, whoever comes and goes, however far loaders draw ahead."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from membership import Schedule

pytestmark = pytest.mark.pure


def once(schedule: Schedule, epochs: int = 1) -> None:
    for epoch in range(epochs):
        assert sorted(schedule.used[epoch]) == list(range(schedule.length)), f"epoch {epoch}"


def disturb(schedule: Schedule, chance: random.Random, spare: int) -> None:
    """Changes the view at random while a step is in progress: deaths, cuts, leaves, joins, returns, all at once."""
    for aborted in [True] * chance.choice([0, 0, 1, 2]) + [False]:
        before = set(schedule.ranks)
        members = set(before)
        if len(members) > 1 and chance.random() < 0.6:
            for gone in chance.sample(sorted(members), chance.randrange(1, len(members))):
                members.discard(gone)
                if chance.random() < 0.5 and not aborted:
                    schedule.cut_off(gone)
        new = [rank for rank in range(spare) if rank not in before]
        if not aborted:
            members |= set(chance.sample(new, chance.randrange(0, min(len(new), 2) + 1)))
            schedule.change(sorted(members))
        else:
            dead = set(schedule.ranks) - members
            for rank in dead:
                del schedule.ranks[rank]
            taken_by = [rank for rank in sorted(members) if chance.random() < 0.5]
            schedule.change(sorted(members), taken_by)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32))
@pytest.mark.parametrize("batch", ["per-rank", "constant"])
def test_every_sample_is_used_once_over_any_changes_of_membership(seed: int, batch: str) -> None:
    chance = random.Random(seed)
    schedule = Schedule(
        chance.randrange(1, 200),
        chance.randrange(1, 6),
        ahead=chance.randrange(5),
        batch_size=chance.randrange(1, 9),
        seed=seed,
        shuffle=chance.random() < 0.5,
        batch=batch,
    )
    rate = chance.choice([0.1, 0.3, 0.9])
    while schedule.epoch < 3:
        schedule.start()
        if chance.random() < rate:
            disturb(schedule, chance, spare=7)
        schedule.complete()
    once(schedule, 3)

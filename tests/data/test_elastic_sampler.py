"""ElasticSampler: every sample once per epoch while ranks join and leave, with loaders that prefetch."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from membership import Schedule
from stormtorch import ElasticSampler

pytestmark = pytest.mark.pure


def once(schedule: Schedule, epochs: int = 1) -> None:
    for epoch in range(epochs):
        assert sorted(schedule.used[epoch]) == list(range(schedule.length)), f"epoch {epoch}"


def disturb(schedule: Schedule, chance: random.Random, spare: int = 7) -> None:
    """Changes the view at random while a step is in progress: deaths, cuts, leaves, joins, returns.

    Views may follow on each other, and some are superseded before all members know them.
    """
    for _ in range(chance.choice([1, 1, 2, 3])):
        members = set(schedule.ranks)
        if len(members) > 1 and chance.random() < 0.6:
            for gone in chance.sample(sorted(members), chance.randrange(1, len(members))):
                members.discard(gone)
                if chance.random() < 0.5 and not schedule.plain:
                    schedule.cut_off(gone)
                else:
                    del schedule.ranks[gone]
        if chance.random() < 0.3:
            schedule.change(sorted(members), [rank for rank in sorted(members) if chance.random() < 0.5])
            continue
        new = [rank for rank in range(spare) if rank not in members]
        members |= set(chance.sample(new, chance.randrange(0, min(len(new), 2) + 1)))
        schedule.change(sorted(members))
    if schedule.view.number != schedule.settled:
        schedule.change(sorted(schedule.ranks))


def storm(chance: random.Random, *, plain: bool = False, **settings: Any) -> Schedule:
    """Three epochs of a random job with random changes."""
    schedule = Schedule(
        chance.randrange(1, 200),
        chance.randrange(1, 6),
        ahead=chance.randrange(5),
        plain=plain,
        batch_size=chance.randrange(1, 9),
        seed=chance.randrange(100),
        shuffle=chance.random() < 0.5,
        **settings,
    )
    rate = chance.choice([0.1, 0.3, 0.9])
    while schedule.epoch < 3:
        schedule.start()
        if chance.random() < rate:
            disturb(schedule, chance)
        schedule.complete()
    return schedule


@pytest.mark.thorough
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
@pytest.mark.parametrize("batch", ["per-rank", "constant"])
def test_every_sample_is_used_once_over_any_changes_of_membership(seed: int, batch: str) -> None:
    once(storm(random.Random(seed), batch=batch), 3)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_plain_loop_over_the_loader_uses_every_sample_once_too(seed: int) -> None:
    once(storm(random.Random(seed), plain=True), 3)


@given(length=st.integers(1, 300), ranks=st.integers(1, 9), batch_size=st.integers(1, 9))
def test_without_changes_nobody_is_idle_but_where_samples_are_too_few(length: int, ranks: int, batch_size: int) -> None:
    schedule = Schedule(length, ranks, batch_size=batch_size)
    schedule.finish()
    once(schedule)
    assert len(schedule.totals) == -(-length // (ranks * batch_size))
    if length >= ranks and batch_size > 1:
        assert schedule.idle == 0
    assert schedule.idle < ranks


def test_batches_of_one_step_differ_by_at_most_one_sample() -> None:
    schedule = Schedule(67, 4, batch_size=8)
    sizes = []
    while schedule.epoch == 0:
        schedule.start()
        sizes.append([len(batch) for rank in schedule.ranks.values() for batch, _ in rank.hand])
        schedule.complete()
    assert sizes == [[8, 8, 8, 8], [5, 5, 4, 4], [5, 4, 4, 4]]


def test_what_a_dead_rank_had_drawn_goes_to_others_in_the_same_epoch() -> None:
    schedule = Schedule(64, 4, ahead=4, batch_size=2, shuffle=False)
    schedule.step()
    schedule.start()
    lost = [index for batch, _ in schedule.ranks[3].hand for index in batch]
    schedule.change([0, 1, 2])
    schedule.complete()
    assert lost == [14, 15]
    assert not set(lost) & set(schedule.used[0])
    schedule.finish()
    once(schedule)


def test_a_death_in_the_last_step_of_an_epoch_makes_one_step_more() -> None:
    for ahead in (0, 4):
        schedule = Schedule(16, 4, ahead=ahead, batch_size=4)
        schedule.start()
        schedule.change([0, 1, 3])
        schedule.complete()
        assert schedule.epoch == 0
        schedule.finish()
        once(schedule)
        assert schedule.totals == [12, 4]


def test_a_rank_that_joins_goes_on_in_the_same_epoch() -> None:
    schedule = Schedule(1000, 2, batch_size=5, seed=7)
    for _ in range(120):
        schedule.step()
    assert schedule.epoch == 1
    schedule.settings["seed"] = 8  # the others' seed counts
    schedule.start()
    schedule.change([0, 1, 5])
    assert schedule.ranks[5].sampler.epoch == 1
    schedule.complete()
    schedule.finish(3)
    once(schedule, 3)
    assert schedule.totals[119:123] == [10, 15, 15, 15]


def test_all_ranks_have_the_same_position() -> None:
    chance = random.Random(5)
    schedule = Schedule(500, 4, batch_size=3)
    for _ in range(40):
        schedule.start()
        disturb(schedule, chance)
        schedule.complete()
        first, *others = [rank.sampler.state_dict() for rank in schedule.ranks.values()]
        assert all(other == first for other in others)


@pytest.mark.thorough
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
@pytest.mark.parametrize("batch", ["per-rank", "constant"])
def test_jobs_that_crash_and_go_on_from_checkpoints_use_every_sample_once_too(seed: int, batch: str) -> None:
    """What was used after the last checkpoint is used again, as the model has forgotten it; nothing else is."""
    chance = random.Random(seed)
    length, batch_size = chance.randrange(1, 200), chance.randrange(1, 9)
    kinds: dict[str, Any] = {"batch_size": batch_size, "seed": chance.randrange(100), "batch": batch}
    kinds["shuffle"] = chance.random() < 0.5
    schedule = Schedule(length, chance.randrange(1, 6), ahead=chance.randrange(5), **kinds)
    kept: tuple[Any, dict[int, list[int]]] | None = None
    crashes = 0
    while schedule.epoch < 2:
        schedule.start()
        if chance.random() < 0.2:
            disturb(schedule, chance)
        schedule.complete()
        if chance.random() < 0.3:
            state = chance.choice(list(schedule.ranks.values())).sampler.state_dict()
            kept = state, {epoch: list(used) for epoch, used in schedule.used.items()}
        if kept is not None and crashes < 4 and chance.random() < 0.1:
            crashes += 1
            schedule = Schedule(length, chance.randrange(1, 6), ahead=chance.randrange(5), **kinds)
            for rank in schedule.ranks.values():
                rank.sampler.load_state_dict(kept[0])
            schedule.used = {epoch: list(used) for epoch, used in kept[1].items()}
    once(schedule, 2)


@pytest.mark.parametrize("batch", ["per-rank", "constant"])
@pytest.mark.parametrize(("before", "after"), [(4, 3), (2, 5), (3, 1)])
def test_a_checkpoint_in_mid_epoch_goes_on_with_another_number_of_ranks(before: int, after: int, batch: str) -> None:
    schedule = Schedule(211, before, batch_size=4, batch=batch)
    for _ in range(20):
        schedule.step()
    state = schedule.ranks[0].sampler.state_dict()
    resumed = Schedule(211, after, batch_size=4, batch=batch)
    for rank in resumed.ranks.values():
        rank.sampler.load_state_dict(state)
    resumed.used = {epoch: list(used) for epoch, used in schedule.used.items()}
    resumed.finish(3)
    once(resumed, 3)
    if batch == "constant":
        assert max(resumed.totals) == 4 * before


def test_the_global_batch_stays_constant_while_ranks_come_and_go() -> None:
    schedule = Schedule(2000, 4, ahead=4, batch_size=8, batch="constant")
    for step in range(40):
        schedule.start()
        if step == 10:
            schedule.change([0, 1, 3])
        if step == 20:
            schedule.change([0])
        if step == 30:
            schedule.change([0, 2, 4, 5, 6, 7])
        schedule.complete()
    # A rank that dies in a step takes its share with it; new ranks add one to the step in which they come.
    assert schedule.totals[:10] == [32] * 10
    assert (schedule.totals[10], schedule.totals[11:20]) == (24, [32] * 9)
    assert schedule.totals[20] < 32
    assert schedule.totals[21:] == [32] * 19
    schedule.finish()
    once(schedule)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32))
@pytest.mark.parametrize("batch", ["per-rank", "constant"])
def test_weights_make_the_mean_over_ranks_one_over_samples(seed: int, batch: str) -> None:
    chance = random.Random(seed)
    schedule = Schedule(300, chance.randrange(1, 6), batch_size=chance.randrange(1, 9), batch=batch)
    while schedule.epoch < 1:
        schedule.start()
        hands = {rank: each.hand for rank, each in schedule.ranks.items()}
        total = sum(len(batch) for hand in hands.values() for batch, weight in hand if weight)
        for hand in hands.values():
            for samples, weight in hand:
                assert weight == pytest.approx(len(samples) * len(hands) / max(total, 1)) or weight == 0
        assert {each.sampler.global_batch for each in schedule.ranks.values()} == {total}
        assert [each.sampler.micro_batches for each in schedule.ranks.values()] == [
            len(hand) for hand in hands.values()
        ]
        if chance.random() < 0.3:
            disturb(schedule, chance)
        schedule.complete()


def test_drop_last_leaves_out_what_does_not_fill_a_step() -> None:
    schedule = Schedule(70, 3, batch_size=4, drop_last=True)
    schedule.finish(2)
    assert schedule.totals == [12] * 10
    assert all(len(set(used)) == 60 for used in schedule.used.values())


def test_an_epoch_of_a_billion_samples_costs_nothing_to_plan() -> None:
    schedule = Schedule(10**9, 8, batch_size=4, shuffle=False)
    schedule.step()
    schedule.start()
    schedule.change([1, 2, 3, 4, 5, 6, 9])
    schedule.complete()
    assert len(schedule.ranks[1].sampler) == pytest.approx(10**9 / 28, rel=1e-6)


def test_a_loader_with_workers_gives_every_sample_once() -> None:
    data = list(range(90))

    def load(sampler: ElasticSampler) -> DataLoader[int]:
        return DataLoader(data, batch_sampler=sampler, num_workers=2)  # type: ignore[arg-type]

    schedule = Schedule(90, 2, batch_size=5, load=load)
    for members in ([0, 1], [1], [1, 2]):
        schedule.start()
        schedule.change(members)
        schedule.complete()
        schedule.step()
    schedule.finish(2)
    once(schedule, 2)

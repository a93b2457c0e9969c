# mypy: disable-error-code="no-untyped-call"
# torch's own backward is untyped.
"""Shards of different sizes: they give the same bits as equal ones, follow measured speeds, and move with views."""

import copy
import math
import time
from typing import Any

import pytest
import torch
from torch import nn

from stormtorch import EXACT, BoundedDrift, Options
from stormtorch.runtime.owner.shard_sizing import LEAST_STEPS
from training import adamw, assert_same, perceptron
from views import Member, all_same, plain_without, with_members

pytestmark = pytest.mark.pure

STEPS = 6
UNEVEN = (1.0, 3.0, 0.0, 0.2)


def policy(**how: Any) -> BoundedDrift:
    return BoundedDrift(**{"reliability": EXACT, "bucket_mb": 5e-4, **how})


def alive(found: list[Any]) -> list[Any]:
    return [each for each in found if each is not None]


def owned(member: Member) -> list[int]:
    """Elements that each rank owns, over all buckets."""
    spans = [bucket.layout.spans for bucket in member.session.buckets]
    return [sum(each[place][1] for each in spans) for place in range(len(spans[0]))]


# --- weights that the user gives --------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("ownership", ["elements", "parameters"])
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
def test_uneven_and_empty_shards_give_the_bits_of_equal_ones(ownership: Any, wire: torch.dtype) -> None:
    def work(member: Member) -> Any:
        member.train(STEPS)
        return member.values(), owned(member), [row.share for row in member.optimizer.ledger]

    how = {"ownership": ownership, "wire": wire, "bucket_mb": 1.0}
    uneven = with_members(work, world=4, make=adamw, policy=policy(shards=UNEVEN, **how))
    equal = with_members(work, world=4, make=adamw, policy=policy(**how))
    assert all_same([each for each, *_ in uneven])
    if wire == torch.float32:
        assert_same(uneven[0][0], equal[0][0])
        assert_same(uneven[0][0], plain_without({}, STEPS, world=4, make=adamw))
    sizes = uneven[0][1]
    assert sizes[2] == 0 and sizes[1] > sizes[0]
    assert ownership == "parameters" or sizes[0] > sizes[3] > 0
    assert equal[0][1][2] > 0
    assert [row[-1] for *_, row in uneven] == pytest.approx([1 / 4.2, 3 / 4.2, 0.0, 0.2 / 4.2], abs=1e-3)


def test_a_rank_that_owns_nothing_clips_and_learns_like_the_others() -> None:
    def work(member: Member) -> Any:
        norms = []
        for step in range(4):
            loss = member.model(torch.ones(2, 8) * (member.rank + step)).square().sum()
            loss.backward()
            norms.append(float(nn.utils.clip_grad_norm_(member.model.parameters(), 0.5)))
            member.optimizer.step()
            member.optimizer.zero_grad()
        return norms, member.values()

    uneven = with_members(work, world=4, make=adamw, policy=policy(shards=UNEVEN))
    equal = with_members(work, world=4, make=adamw, policy=policy())
    assert all_same([each for _, each in uneven])
    assert [norms for norms, _ in uneven] == [pytest.approx(equal[0][0], rel=1e-5)] * 4


@pytest.mark.parametrize("victim", range(4))
def test_uneven_shards_survive_the_death_of_any_rank(victim: int) -> None:
    def work(member: Member) -> Any:
        if member.rank == victim:
            member.train(3)
            member.die()
            return None
        member.train(STEPS + 2)
        return member.values()

    found = alive(with_members(work, world=4, make=adamw, policy=policy(shards=UNEVEN)))
    assert len(found) == 3 and all_same(found)
    assert_same(found[0], plain_without({victim: 3}, STEPS + 2, world=4, make=adamw))


def test_checkpoints_do_not_depend_on_how_shards_are_cut() -> None:
    def save(member: Member) -> Any:
        member.train(3)
        return copy.deepcopy(member.model.state_dict()), copy.deepcopy(member.optimizer.state_dict())

    saved = with_members(save, world=4, make=adamw, policy=policy(shards=UNEVEN))[0]

    def load(member: Member) -> Any:
        member.model.load_state_dict(saved[0])
        member.optimizer.load_state_dict(copy.deepcopy(saved[1]))
        for step in range(3, STEPS):
            member.step(step)
        return member.values()

    for shards in ("equal", (0.0, 0.0, 1.0, 0.0)):
        found = with_members(load, world=4, make=adamw, policy=policy(shards=shards))
        assert_same(found[0], plain_without({}, STEPS, world=4, make=adamw))


def test_uneven_shards_go_by_machines_too() -> None:
    def work(member: Member) -> Any:
        for step in range(3):
            member.step(step)
        return member.values(), member.session._reduction._islands is not None

    model, machines = perceptron(inside=12000), ["a", "a", "b", "b"]
    how: Any = {"model": model, "machines": machines, "world": 4, "make": adamw}
    uneven = with_members(work, policy=policy(shards=UNEVEN, bucket_mb=0.2), **how)
    equal = with_members(work, policy=policy(bucket_mb=0.2), **how)
    assert all(by_machines for _, by_machines in uneven)
    assert all_same([each for each, _ in uneven])
    for one, other in zip(uneven[0][0], equal[0][0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shards", [(), (0.0, 0.0), (1.0, -1.0), (1.0, math.inf), "fair", None, [1.0, 1.0]])
def test_wrong_shards_are_refused_by_name(shards: Any) -> None:
    with pytest.raises(ValueError, match="shards must be"):
        BoundedDrift(shards=shards)


def test_weights_for_another_number_of_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="shards must have one weight per rank, 4, got 3"):
        with_members(lambda _: None, world=4, make=adamw, policy=policy(shards=(1.0, 2.0, 3.0)))


# --- shares by speed --------------------------------------------------------------------------------------------------

BIG = 4000  # hidden units, 240 KB, so that an exchange fills several windows of the meter at these rates
OPTIONS = Options(datagram_bytes=1472, silence_s=20.0)


def by_rate(work: Any, inside: int = BIG, **how: Any) -> list[Any]:
    given: Any = {"shards": "rate", "bucket_mb": 1.0, "standby": 0, **how}
    model = perceptron(inside=inside)
    return with_members(work, world=4, model=model, make=adamw, policy=policy(**given), rate="8mbit", options=OPTIONS)


def steps_s(member: Member, until: int) -> float:
    """Virtual seconds of a step, over the next ones."""
    member.session.wait()
    began, first = member.network.now_s, member.session.steps
    member.train(until)
    member.session.wait()
    return float((member.network.now_s - began) / (until - first))


@pytest.mark.thorough
def test_a_line_that_is_thin_one_way_makes_its_rank_own_less_and_steps_shorter() -> None:
    def work(member: Member) -> Any:
        if member.rank == 0:
            member.network.set_link_rate(2, up="0.8mbit")
        member.train(2)
        before_s = steps_s(member, 10)
        member.train(LEAST_STEPS + 12)
        after_s = steps_s(member, LEAST_STEPS + 20)
        return before_s, after_s, member.values(), member.events(), member.session.view, owned(member)

    found = by_rate(work)
    assert all_same([values for _, _, values, *_ in found])
    for before_s, after_s, _, events, view, sizes in found:
        assert view.number == 2 and view.members == (0, 1, 2, 3)
        assert any("ranks own shares: rank 0" in event for event in events)
        assert sizes[2] < 0.4 * min(sizes[0], sizes[1], sizes[3])
        assert before_s / after_s > 1.25  # the formula says 1.41
    assert_same(found[0][2], plain_without({}, LEAST_STEPS + 20, world=4, make=adamw, model=perceptron(inside=BIG)))


@pytest.mark.thorough
def test_equal_lines_and_a_line_thin_both_ways_keep_equal_shards() -> None:
    def work(member: Member) -> Any:
        if member.rank == 0:
            member.network.set_link_rate(2, up="0.8mbit", down="0.8mbit")
        member.train(LEAST_STEPS + 9)
        return member.session.view.number

    assert by_rate(work) == [1, 1, 1, 1]


def test_owning_nothing_makes_a_line_that_is_thin_both_ways_slower() -> None:
    def work(member: Member) -> float:
        if member.rank == 0:
            member.network.set_link_rate(2, up="0.8mbit", down="0.8mbit")
        member.train(2)
        return steps_s(member, 5)

    # The formula says 4/3: the bottleneck carries all gradients out, then all parameters in, and never both at once.
    # This model is so small that it fills no queue, and each step takes as long as the last.
    nothing, equal = (max(by_rate(work, 1000, shards=shards)) for shards in ((1.0, 1.0, 0.0, 1.0), "equal"))
    assert nothing > 1.2 * equal


@pytest.mark.thorough
def test_shares_follow_when_rates_change_and_not_too_often() -> None:
    def work(member: Member) -> Any:
        if member.rank == 0:
            member.network.set_link_rate(1, up="0.8mbit")
        member.train(LEAST_STEPS + 10)
        thin = owned(member)
        if member.rank == 0:
            member.network.set_link_rate(1)
            member.network.set_link_rate(3, up="0.8mbit")
        member.train(3 * LEAST_STEPS + 16)
        return thin, owned(member), member.session.view.number, member.values()

    found = by_rate(work)
    for thin, after, views, _ in found:
        assert thin[1] < 0.5 * min(thin[0], thin[2], thin[3])
        assert after[3] < 0.5 * min(after[0], after[1], after[2])
        assert 3 <= views <= 4
    expected = plain_without({}, 3 * LEAST_STEPS + 16, world=4, make=adamw, model=perceptron(inside=BIG))
    assert_same(found[0][3], expected)


@pytest.mark.thorough
def test_a_slow_processor_owns_less() -> None:
    def work(member: Member) -> Any:
        if member.rank == 1:
            # Registered after the session's own hook, so that its time counts as part of the step.
            member.optimizer.register_step_pre_hook(lambda *_: time.sleep(4e-6 * owned(member)[1]))
        member.train(LEAST_STEPS + 6)
        member.session.wait()
        return member.optimizer.ledger[-1].share

    found = with_members(
        work,
        world=3,
        model=perceptron(inside=BIG),
        make=adamw,
        policy=policy(shards="rate", bucket_mb=1.0, standby=0),
        options=OPTIONS,
        rate="400mbit",
    )
    assert found[1] < 0.5 * found[0] and found[1] < 0.5 * found[2]


@pytest.mark.thorough
@pytest.mark.parametrize("victim", [0, 2])
def test_a_death_while_shards_are_cut_anew_leaves_the_others_exact(victim: int) -> None:
    at = LEAST_STEPS + 4  # the step at which the lowest rank requests a view

    def work(member: Member) -> Any:
        if member.rank == 0:
            member.network.set_link_rate(2, up="0.8mbit")
        while member.session.steps < 2 * LEAST_STEPS + 8:
            asked = any("requests a view" in event for event in member.session._row.events)
            if member.rank == victim and (asked or member.session.steps > at):
                member.network.set_unreachable(victim, True)
                return None
            member.step(member.session.steps)
        return member.values(), member.session.view, member.events()

    found = alive(by_rate(work, standby=1))
    assert len(found) == 3 and all_same([each for each, *_ in found])
    _, view, events = found[0]
    assert victim not in view.members and view.number >= 2
    if not any("is lost" in event for event in events):
        expected = plain_without(
            {victim: view.step}, 2 * LEAST_STEPS + 8, world=4, make=adamw, model=perceptron(inside=BIG)
        )
        assert_same(found[0][0], expected)

# mypy: disable-error-code="no-untyped-call"
# torch's own backward is untyped.
"""Ranks that die at any moment of a step, with user changes: members keep equal bits, or an event reports the loss."""

import copy
from typing import Any

import pytest
import torch

from stormtorch import BoundedDrift, DiLoCo, GradientAveraging, ModelAveraging, Options, StormError, exact, prepare
from stormtorch.collectives import Group
from stormtorch.exchange.simulated import SimulatedNetwork, SimulatedTransport
from stormtorch.policies.policy import Policy
from training import adamw, assert_same, mean_gradients, perceptron, plain_step, regression, sgd, values, vectors
from views import EXACTLY, OPTIONS, Member, all_same, plain_without, with_members

pytestmark = pytest.mark.pure

STEPS, AT = 9, 4


def alive(found: list[Any]) -> list[Any]:
    return [each for each in found if each is not None]


@pytest.mark.thorough
@pytest.mark.parametrize("moment", ["before backward", "before step", "after step"])
@pytest.mark.parametrize("victim", range(4))
def test_survivors_have_equal_bits_whenever_an_owner_dies(moment: str, victim: int) -> None:
    def work(member: Member) -> Any:
        if member.rank == victim:
            member.train(AT)
            if moment != "after step":
                loss = regression(member.model, vectors(victim, AT))
                if moment == "before step":
                    loss.backward()
            member.network.set_unreachable(victim, True)
            return None
        member.train(STEPS)
        return member.values(), member.events(), member.session.view.step

    found = alive(with_members(work, world=4, make=adamw))
    assert len(found) == 3 and all_same([each for each, *_ in found])
    values, events, begun = found[0]
    expected = plain_without({victim: begun}, STEPS, world=4, make=adamw)
    lost = any(f"the last update of the shard of rank {victim} is lost" in event for event in events)
    if not lost:
        assert_same(values, expected)
    else:
        # No other rank had the mean gradient of its shard.
        assert moment == "before step" and begun == AT + 1
        for one, other in zip(values, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0.02)


@pytest.mark.parametrize("policy", [BoundedDrift(standby=0, reliability=EXACTLY.reliability, bucket_mb=5e-4)])
def test_without_a_standby_the_state_begins_anew_and_training_goes_on(policy: Policy) -> None:
    def work(member: Member) -> Any:
        if member.rank == 1:
            member.train(AT)
            member.die()
            return None
        member.train(AT)
        member.session.wait()
        before = values(member.model)
        member.train(STEPS)
        return member.values(), member.events(), before

    found = alive(with_members(work, world=4, make=adamw, policy=policy))
    assert all_same([each for each, *_ in found])
    for _, events, before in found:
        assert any("the shard of rank 1 had no standby left" in event and "is reset" in event for event in events)
        assert_same(before, plain_without({}, AT, world=4, make=adamw))
    for one, other in zip(found[0][0], plain_without({1: AT}, STEPS, world=4, make=adamw), strict=True):
        assert not torch.equal(one, other)
        torch.testing.assert_close(one, other, rtol=0, atol=0.03)


@pytest.mark.parametrize("pair", [(0, 1), (1, 2), (4, 0)])
def test_owner_and_standby_that_die_at_once_are_told_of_in_the_same_words(pair: tuple[int, int]) -> None:
    def work(member: Member) -> Any:
        if member.rank in pair:
            member.train(AT)
            member.die()
            return None
        member.train(STEPS)
        return member.values(), member.events()

    found = alive(with_members(work, world=5, make=adamw))
    assert len(found) == 3 and all_same([each for each, _ in found])
    for _, events in found:
        assert any(f"the shard of rank {pair[0]} had no standby left" in event for event in events)
        assert not any(f"the shard of rank {pair[1]} had" in event for event in events)


@pytest.mark.thorough
@pytest.mark.parametrize("call", ["exact", "model", "optimizer"])
@pytest.mark.parametrize("callers", ["one", "all"])
@pytest.mark.parametrize("caller", [0, 3])
def test_calls_while_a_rank_dies_give_all_members_the_same_bits(call: str, callers: str, caller: int) -> None:
    def made(member: Member) -> list[torch.Tensor]:
        if call == "exact":
            return member.values()
        if call == "model":
            return [each.clone() for each in member.model.state_dict().values()]
        state = member.optimizer.state_dict()["state"]
        return [value.clone() for each in state.values() for value in each.values()]

    def work(member: Member) -> Any:
        member.train(AT)
        if member.rank == 1:
            member.die()
            return None
        found = made(member) if callers == "all" or member.rank == caller else []
        member.train(STEPS)
        return found, member.values()

    found = alive(with_members(work, world=4, make=adamw))
    assert all_same([each for _, each in found])
    assert_same(found[0][1], plain_without({1: AT}, STEPS, world=4, make=adamw))
    saved = [each for each, _ in found if each]
    assert len(saved) == (3 if callers == "all" else 1)
    assert all_same(saved)
    if call != "optimizer":
        assert_same(saved[0], plain_without({}, AT, world=4, make=adamw))


def test_accumulated_gradients_survive_a_death_in_no_sync() -> None:
    def work(member: Member) -> Any:
        while (number := member.session.steps) < STEPS:
            with member.model.no_sync():
                regression(member.model, vectors(member.rank, 2 * number)).backward()
            if member.rank == 2 and number == AT:
                member.die()
                return None
            regression(member.model, vectors(member.rank, 2 * number + 1)).backward()
            member.optimizer.step()
            member.optimizer.zero_grad()
        return member.values()

    model = perceptron()
    optimizer = adamw(model)
    for step in range(STEPS):
        ranks = [rank for rank in range(4) if rank != 2 or step < AT]
        each = []
        for rank in ranks:
            for part in range(2):
                regression(model, vectors(rank, 2 * step + part)).backward()
            each.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
            model.zero_grad()
        total = [sum(parts[1:], parts[0]) / len(ranks) for parts in zip(*each, strict=True)]
        plain_step(model, optimizer, total)
    for found in alive(with_members(work, world=4, make=adamw)):
        assert_same(found, values(model))


@pytest.mark.parametrize("died", ["before backward", "before clipping"])
def test_norms_are_those_of_the_members(died: str) -> None:
    def work(member: Member) -> Any:
        norms = []
        while (number := member.session.steps) < STEPS:
            if member.rank == 2 and number == AT and died == "before backward":
                member.die()
                return None
            regression(member.model, vectors(member.rank, number)).backward()
            if member.rank == 2 and number == AT:
                member.network.set_unreachable(2, True)
                return None
            norms.append(float(torch.nn.utils.clip_grad_norm_(member.model.parameters(), 0.05)))
            member.optimizer.step()
            member.optimizer.zero_grad()
        return norms, member.values()

    try:
        found = alive(with_members(work, world=4, make=sgd))
    except StormError as error:
        assert died == "before clipping" and "rank 2" in str(error)
        return
    assert all_same([each for _, each in found])
    assert found[0][0] == found[1][0] == found[2][0]
    if died == "before backward":
        model = perceptron()
        optimizer = sgd(model)
        for step in range(STEPS):
            parts = [vectors(rank, step) for rank in range(4) if rank != 2 or step < AT]
            gradients = mean_gradients(model, parts, regression)
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
        for one, other in zip(found[0][1], values(model), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "policy",
    [
        BoundedDrift(max_lag=2),
        BoundedDrift(overlap=True),
        BoundedDrift(max_lag=2, overlap=True, weights="horvitz-thompson"),
        BoundedDrift(wire=torch.bfloat16),
        BoundedDrift(wire=torch.int8),
        ModelAveraging(),
        ModelAveraging(every=2, overlap=True),
        GradientAveraging(),
    ],
    ids=["max_lag", "overlap", "both", "bfloat16", "int8", "models", "models every second step", "gradients"],
)
@pytest.mark.parametrize("victim", [0, 2])
def test_every_policy_goes_on_without_a_dead_rank_and_takes_it_back(policy: Policy, victim: int) -> None:
    def work(member: Member) -> Any:
        member.train(6)
        if member.rank == victim:
            member.network.set_unreachable(victim, True)
        while member.network.now_s < 15.0 or member.session.view.number < 3:
            if member.rank == (victim + 1) % 4 and member.network.now_s > 6.0:
                member.network.set_unreachable(victim, False)
            member.step(member.session.steps)
            member.transport.wait_view(1 << 62, 0.5)
        members = member.session.view.members
        member.train(60)
        return members, member.values(), member.session.view.number, member.events()

    found = with_members(work, world=4, make=adamw, policy=policy, loss=0.1, seed=2)
    assert all(members == (0, 1, 2, 3) for members, *_ in found)
    assert len({number for _, _, number, _ in found}) == 1
    if isinstance(policy, BoundedDrift | ModelAveraging):
        assert all_same([each for _, each, *_ in found])
    assert all(each.isfinite().all() for _, values, *_ in found for each in values)
    events = found[(victim + 1) % 4][3]
    assert any(f"rank {victim} is gone" in event for event in events)
    assert any(f"rank {victim} is new" in event or f"rank {victim} is back" in event for event in events), events


@pytest.mark.thorough
@pytest.mark.parametrize(
    "policy",
    [DiLoCo(every=2, bucket_mb=5e-4), ModelAveraging(bucket_mb=5e-4), GradientAveraging(bucket_mb=5e-4)],
    ids=lambda each: type(each).__name__,
)
def test_a_rank_that_hears_of_the_next_view_first_makes_the_round_that_others_have_begun(policy: Policy) -> None:
    """Otherwise it would wait for them in the next view, and they for it in their round."""

    def work(member: Member) -> Any:
        session, membership = member.session, member.session.membership
        transport: Any = member.transport
        settle = membership.settle

        def late(rounds: int) -> bool:
            # All others know that this rank has its state. They begin a round, and a rank requests another view.
            number = membership.view.number
            membership.settle = settle
            transport.wait_view(1 << 62, 1.0)
            transport.request_view()
            while transport.view().number == number:
                transport.wait_view(number, 0.1)
            return bool(settle(rounds))

        if member.rank == 1:
            membership.settle = late
        member.train(4)
        if member.rank == 3:
            member.die()
            return None
        member.train(24)
        return member.values(), session.view, membership.round

    found = alive(with_members(work, world=4, make=sgd, policy=policy))
    assert len({view.number for _, view, _ in found}) == len({rounds for *_, rounds in found}) == 1
    assert all(view.members == (0, 1, 2) and view.number >= 3 for _, view, _ in found)


def test_two_optimizers_of_one_model_change_views_together() -> None:
    models = [perceptron() for _ in range(4)]
    network = SimulatedNetwork(4, options=OPTIONS)

    def work(transport: SimulatedTransport) -> Any:
        model: Any = models[transport.rank]
        first, second = sgd(model[0]), adamw(model[2])
        prepare(model, first, policy=EXACTLY, group=Group(transport))
        prepare(model, second, policy=EXACTLY, group=Group(transport))
        sessions: Any = [first.session, second.session]  # type: ignore[attr-defined]
        while (number := sessions[0].steps) < STEPS:
            if transport.rank == 1 and number == AT:
                for each in sessions:
                    each.wait()
                network.set_unreachable(1, True)
                return None
            regression(model, vectors(transport.rank, number)).backward()
            first.step()
            second.step()
            model.zero_grad()
            first.zero_grad()
            second.zero_grad()
        with exact(model):
            return values(model), [each.view for each in sessions], sessions[1].steps

    found = alive(network.run(work))
    model = perceptron()
    both = sgd(model[0]), adamw(model[2])
    for step in range(STEPS):
        parts = [vectors(rank, step) for rank in range(4) if rank != 1 or step < AT]
        for parameter, gradient in zip(model.parameters(), mean_gradients(model, parts, regression), strict=True):
            parameter.grad = gradient
        for optimizer in both:
            optimizer.step()
    for mine, views, steps in found:
        assert_same(mine, values(model))
        assert [view.members for view in views] == [(0, 2, 3)] * 2 and steps == STEPS


def test_two_models_change_views_each_at_its_own_step() -> None:
    network = SimulatedNetwork(4, options=OPTIONS)
    pairs = [(perceptron(), perceptron(seed=1)) for _ in range(4)]

    def work(transport: SimulatedTransport) -> Any:
        made = []
        for model, make in zip(pairs[transport.rank], (sgd, adamw), strict=True):
            optimizer: Any = make(model)
            prepare(model, optimizer, policy=EXACTLY, group=Group(transport))
            made.append(Member(transport.rank, network, transport, model, optimizer))
        first, second = made
        while (number := first.session.steps) < STEPS:
            first.step(number)
            if transport.rank == 3 and number == AT:
                first.session.wait()
                second.die()
                return None
            if second.session.steps <= number:
                second.step(second.session.steps)
        return [each.values() for each in made]

    found = alive(network.run(work))
    assert len(found) == 3
    for one, other in found:
        assert_same(one, plain_without({3: AT + 1}, STEPS, world=4, make=sgd))
        assert_same(other, plain_without({3: AT}, STEPS, world=4, make=adamw, model=perceptron(seed=1)))


@pytest.mark.thorough
@pytest.mark.parametrize("late", [False, True], ids=["before prepare", "after prepare"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_that_was_loaded_survives_the_death_of_its_owner(late: bool, dtype: torch.dtype) -> None:
    first = perceptron().to(dtype)
    begun = adamw(first)
    for step in range(3):
        plain_step(first, begun, mean_gradients(first, [vectors(9, step).to(dtype)], regression))
    parameters, state = copy.deepcopy(first.state_dict()), copy.deepcopy(begun.state_dict())
    network = SimulatedNetwork(4, options=OPTIONS)
    models = [perceptron().to(dtype) for _ in range(4)]

    def work(transport: SimulatedTransport, victim: int | None) -> Any:
        model = copy.deepcopy(models[transport.rank])
        optimizer: Any = adamw(model)
        if not late:
            model.load_state_dict(parameters)
            optimizer.load_state_dict(copy.deepcopy(state))
        prepare(model, optimizer, policy=EXACTLY, group=Group(transport))
        member = Member(transport.rank, network, transport, model, optimizer)
        if late:
            member.train(2, data=lambda rank, step: vectors(rank, step).to(dtype))
            model.load_state_dict(parameters)
            optimizer.load_state_dict(copy.deepcopy(state))
        begin = member.session.steps
        # All ranks contribute the same gradients, so that a missing rank changes nothing and only state matters.
        member.train(
            begin + (AT if member.rank == victim else STEPS),
            data=lambda rank, step: vectors(0, step - begin).to(dtype),
        )
        if member.rank == victim:
            member.die()
            return None
        return member.values()

    undisturbed = network.run(lambda transport: work(transport, None))
    network = SimulatedNetwork(4, options=OPTIONS)
    for found in alive(network.run(lambda transport: work(transport, 1))):
        for one, other in zip(found, undisturbed[0], strict=True):
            # The mean of three equal numbers is rounded, unlike that of four.
            torch.testing.assert_close(one, other, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-6)


def test_what_users_carry_reaches_every_member_when_a_view_begins() -> None:
    def work(member: Member) -> Any:
        taken: list[dict[int, bytes]] = []
        nothing: list[dict[int, bytes]] = []
        steps: list[int] = []
        member.session.carry("name", lambda: f"rank {member.rank}".encode(), taken.append)
        member.session.carry("nothing", lambda: b"", nothing.append)
        member.session.carry("all", lambda: bytes(range(256)), nothing.append)
        member.session.on_step(steps.append)
        first = member.session.view
        if member.rank == 0:
            member.train(AT)
            member.die()
            return None
        member.train(STEPS)
        three = (1, 2, 3)
        assert nothing == [dict.fromkeys(three, b""), dict.fromkeys(three, bytes(range(256)))]
        return taken, steps, first, member.session.view

    for taken, steps, first, last in alive(with_members(work, world=4, make=sgd)):
        assert taken == [{rank: f"rank {rank}".encode() for rank in (1, 2, 3)}]
        assert steps == list(range(1, STEPS + 1))
        assert (first.number, first.members, first.step) == (1, (0, 1, 2, 3), 0)
        assert last.number > 1 and last.members == (1, 2, 3) and last.step == AT


def test_options_bound_how_long_a_death_takes() -> None:
    def work(member: Member) -> float:
        member.train(AT)
        began = member.network.now_s
        if member.rank == 1:
            member.die()
            return 0.0
        member.train(AT + 1)
        return member.network.now_s - began

    options = Options(datagram_bytes=1472, silence_s=0.5)
    assert 0.5 < max(with_members(work, world=4, make=sgd, options=options)) < 1.5

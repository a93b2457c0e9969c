# mypy: disable-error-code="no-untyped-call"
# torch's own backward is untyped.
"""Collective calls that one rank makes alone: the others serve them while they wait, or every rank gets an error."""

import copy
import logging
import threading
import time
from typing import Any

import pytest
import torch
from conftest import local_world
from torch import nn

from stormtorch import BoundedDrift, ModelAveraging, Options, exact, faults, prepare
from stormtorch.collectives import Group, barrier, receive, send
from stormtorch.errors import ExchangeTimeout, StormError
from stormtorch.exchange import waiting
from stormtorch.exchange.exchange import Transport
from stormtorch.exchange.waiting import in_call
from stormtorch.policies.policy import Policy
from training import (
    EXACTLY,
    Rank,
    adamw,
    assert_same,
    mean_gradients,
    on_ranks,
    perceptron,
    plain,
    plain_step,
    regression,
    values,
    vectors,
)

pytestmark = pytest.mark.pure

STEPS = 3
_SEEDING = threading.Lock()  # ranks are threads, and torch has one generator for all


def normalised() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.Linear(24, 6))


def tensors(state: Any) -> list[torch.Tensor]:
    """All tensors of a state dict of a model or an optimizer, in order."""
    if isinstance(state, torch.Tensor):
        return [state.detach().clone()]
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, list) else []
    return [each for part in parts for each in tensors(part)]


def saved(rank: Rank, ranks: range) -> list[torch.Tensor]:
    """Trains, with a checkpoint in the middle that some ranks make. Returns its content, and the final parameters."""
    rank.train(STEPS)
    found: list[torch.Tensor] = []
    if rank.rank in ranks:
        found = tensors(rank.model.state_dict()) + tensors(rank.optimizer.state_dict())
    rank.train(range(STEPS, 2 * STEPS))
    return found


@pytest.mark.thorough
@pytest.mark.parametrize(
    "policy", [EXACTLY, BoundedDrift(), BoundedDrift(overlap=True)], ids=["exact", "drift", "overlap"]
)
@pytest.mark.parametrize("make", [perceptron, normalised])
def test_one_rank_may_save_what_all_would_save(policy: Policy, make: Any) -> None:
    settings: dict[str, Any] = {"policy": policy, "loss": 0.1, "seed": 4}
    alone = on_ranks(make(), adamw, lambda rank: saved(rank, range(1)), **settings)
    together = on_ranks(make(), adamw, lambda rank: saved(rank, range(4)), **settings)
    if policy is EXACTLY or make is perceptron:
        assert_same(alone[0], together[0])
    else:  # means of statistics are summed in the order of arrival
        torch.testing.assert_close(alone[0], together[0], rtol=1e-6, atol=1e-7)


def test_ranks_that_make_the_call_and_ranks_that_wait_elsewhere_meet() -> None:
    found = on_ranks(perceptron(), adamw, lambda rank: saved(rank, range(1, 3)), policy=BoundedDrift(), loss=0.1)
    assert_same(found[1], found[2])
    assert not found[0] and not found[3]


def test_a_slow_rank_takes_part_in_calls_that_it_makes_itself_afterwards() -> None:
    def work(transport: Transport) -> list[torch.Tensor]:
        model, group = normalised(), Group(transport)
        rank = Rank(transport.rank, 2, model, adamw(model))
        prepare(model, rank.optimizer, policy=BoundedDrift(), group=group)
        found = []
        with faults(loss=0.2, seed=transport.rank):
            for step in range(STEPS):
                rank.train(range(step, step + 1))
                if rank.rank == 1:
                    with in_call("what only this rank waits in"):
                        receive(group, torch.zeros(1), 0).wait()  # and serves the call while it waits here
                found += tensors(model.state_dict()) + tensors(rank.optimizer.state_dict())
                with exact(model):
                    found += values(model)
                if rank.rank == 0:
                    send(group, torch.zeros(1), 1).wait()
        return found

    first, second = local_world(2, work, options=Options(datagram_bytes=256, timeout_s=20.0))
    assert_same(first, second)


def test_training_goes_on_exactly_after_one_rank_has_saved() -> None:
    def work(rank: Rank) -> list[torch.Tensor]:
        saved(rank, range(1))
        return rank.values()

    for ours in on_ranks(perceptron(), adamw, work):
        assert_same(ours, plain(perceptron(), adamw, 2 * STEPS))


def test_one_rank_may_evaluate_and_save_while_others_take_a_closure_or_a_barrier() -> None:
    def work(transport: Transport) -> list[torch.Tensor]:
        model, group = perceptron(), Group(transport)
        optimizer = adamw(model)
        prepare(model, optimizer, policy=BoundedDrift(), group=group)
        found: list[torch.Tensor] = []
        for step in range(STEPS):

            def closure(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = regression(model, vectors(transport.rank, step))
                loss.backward()
                return loss

            optimizer.step(closure)  # type: ignore[arg-type]  # torch wants a float, and gets what everybody gives it
            if transport.rank == 0:
                with exact(model):
                    found = values(model)
                assert_same(tensors(model.state_dict()), found)
        if transport.rank == 0:
            assert tensors(optimizer.state_dict())
        with in_call("a barrier"):
            barrier(group).wait()
        return found

    local_world(2, work)


def test_a_call_between_backward_and_step_of_others_is_an_error_for_the_caller_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def work(rank: Rank) -> int:
        rank.train(STEPS)
        regression(rank.model, vectors(rank.rank, STEPS)).backward()
        if rank.rank == 1:
            with pytest.raises(
                StormError, match=r"rank 1 has called model.state_dict\(\) after 3 steps, and rank \d has made 4"
            ):
                rank.model.state_dict()
        rank.optimizer.step()
        rank.optimizer.zero_grad()
        rank.train(1)
        return int(rank.optimizer.session.steps)

    with caplog.at_level(logging.WARNING, "stormtorch"):
        assert on_ranks(perceptron(), adamw, work) == [STEPS + 2] * 4
    messages = [each.getMessage() for each in caplog.records]
    for other in (0, 2, 3):
        assert sum(f"rank {other}: takes no part in model.state_dict() of rank 1" in each for each in messages) == 1, (
            messages
        )


def test_ranks_may_make_different_calls_at_once() -> None:
    def work(rank: Rank) -> list[torch.Tensor]:
        rank.train(STEPS)
        first, second = (rank.model, rank.optimizer) if rank.rank else (rank.optimizer, rank.model)
        found = {each: tensors(each.state_dict()) for each in (first, second)}
        rank.train(1)
        return found[rank.model] + found[rank.optimizer]

    first, *others = on_ranks(perceptron(), adamw, work)
    for other in others:
        assert_same(first, other)


def test_one_rank_may_save_the_optimizer_before_all_evaluate() -> None:
    def work(rank: Rank) -> list[torch.Tensor]:
        rank.train(STEPS)
        if rank.rank == 0:
            assert tensors(rank.optimizer.state_dict())
        found = rank.values()
        rank.train(1)
        return found

    for found in on_ranks(perceptron(), adamw, work):
        assert_same(found, plain(perceptron(), adamw, STEPS))


def test_a_mean_that_one_rank_asks_for_alone_is_an_error_for_this_rank_at_once() -> None:
    def work(rank: Rank) -> int:
        rank.train(STEPS)
        if rank.rank == 0:
            with pytest.raises(StormError, match=r"rank 0 has called model.state_dict\(\) after 3 steps"):
                rank.model.state_dict()
        rank.train(1)
        return int(rank.optimizer.session.steps)

    assert on_ranks(perceptron(), adamw, work, policy=ModelAveraging()) == [STEPS + 1] * 4


# --- what is kept of calls of others ----------------------------------------------------------------------------------


def meets(transport: Transport, group: Group, *, elsewhere: bool) -> None:
    """Rank 1 waits for rank 0, and meanwhile serves rank 0's calls."""
    if transport.rank == 0:
        send(group, torch.zeros(1), 1).wait()
    else:
        with in_call("what only this rank waits in", elsewhere=elsewhere):
            receive(group, torch.zeros(1), 0).wait()


def prepared(transport: Transport, policy: Policy) -> tuple[Any, Any, Group, Rank]:
    with _SEEDING:
        model = perceptron()
    group = Group(transport)
    rank = Rank(transport.rank, transport.world, model, adamw(model))
    prepare(model, rank.optimizer, policy=policy, group=group)
    return model, rank.optimizer, group, rank


@pytest.mark.parametrize("elsewhere", [False, True], ids=["call", "collective"])
@pytest.mark.parametrize("policy", [BoundedDrift(), ModelAveraging()], ids=["drift", "averaging"])
def test_what_was_loaded_is_not_overwritten_by_what_was_saved_before(policy: Policy, elsewhere: bool) -> None:
    def work(transport: Transport) -> list[torch.Tensor]:
        model, _, group, rank = prepared(transport, policy)
        rank.train(STEPS)
        if transport.rank == 0:
            model.state_dict()
        meets(transport, group, elsewhere=elsewhere)
        model.load_state_dict({name: torch.full_like(each, 7.0) for name, each in perceptron().state_dict().items()})
        with exact(model):
            return values(model)

    for found in local_world(2, work, options=Options(timeout_s=20.0)):
        assert all(bool((each == 7.0).all()) for each in found)


def test_an_optimizer_that_was_loaded_saves_what_was_loaded() -> None:
    def work(transport: Transport) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        _, optimizer, group, rank = prepared(transport, BoundedDrift())
        rank.train(1)
        first = copy.deepcopy(optimizer.state_dict())
        rank.train(range(1, STEPS))
        if transport.rank == 0:
            optimizer.state_dict()
        meets(transport, group, elsewhere=False)
        optimizer.load_state_dict(first)
        return tensors(first), tensors(optimizer.state_dict())

    for first, again in local_world(2, work, options=Options(timeout_s=20.0)):
        assert_same(first, again)


def test_an_optimizer_state_that_was_kept_has_the_learning_rate_of_now() -> None:
    def work(transport: Transport) -> tuple[float, list[int]]:
        _, optimizer, group, rank = prepared(transport, BoundedDrift())
        rank.train(STEPS)
        if transport.rank == 1:
            meets(transport, group, elsewhere=False)
        optimizer.param_groups[0]["lr"] = 0.001
        (found,) = optimizer.state_dict()["param_groups"]
        if transport.rank == 0:
            meets(transport, group, elsewhere=False)
        return found["lr"], found["params"]

    assert local_world(2, work, options=Options(timeout_s=20.0)) == [(0.001, [0, 1, 2, 3])] * 2


def test_one_rank_may_save_a_mean_in_front_of_a_barrier_before_all_evaluate() -> None:
    def work(transport: Transport) -> int:
        model, optimizer, group, rank = prepared(transport, ModelAveraging(every=4))
        rank.train(4)
        if transport.rank == 0:
            model.state_dict()
        with in_call("a barrier", elsewhere=True):
            barrier(group).wait()
        with exact(model):
            pass
        rank.train(range(4, 8))
        return int(optimizer.session.steps)

    assert local_world(2, work, options=Options(timeout_s=20.0)) == [8, 8]


# --- a call that fails ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("looks_late", [False, True], ids=["at the same step", "steps later"])
def test_a_call_that_timed_out_ends_nobodys_training_and_may_be_made_again(looks_late: bool) -> None:
    def work(transport: Transport) -> tuple[list[torch.Tensor], int]:
        model, optimizer, _, rank = prepared(transport, BoundedDrift(collective_wait_s=0.5))
        rank.train(2)
        if transport.rank == 0:
            with pytest.raises(ExchangeTimeout):
                model.state_dict()
            if not looks_late:
                time.sleep(0.6)  # rank 1 waits in backward, and finds a call that has been cancelled
        else:
            time.sleep(0.8)
        rank.train(range(2, 4))
        found = tensors(model.state_dict()) if transport.rank == 0 else []
        rank.train(range(4, 6))
        return found + rank.values(), len(optimizer.ledger)

    began = time.monotonic()
    (first, steps), (second, same) = local_world(2, work, options=Options(timeout_s=20.0))
    assert steps == same == 6 and time.monotonic() - began < 10.0
    assert_same(first[-4:], second)
    assert_same(first[:4], plain(perceptron(), adamw, 4, world=2))


@pytest.mark.parametrize("callers", [(0,), (1,), (0, 1)], ids=str)
def test_state_of_a_rank_that_left_is_saved_by_those_who_are_there(callers: tuple[int, ...]) -> None:
    def work(transport: Transport) -> Any:
        _, optimizer, _, rank = prepared(transport, EXACTLY)
        rank.train(2)
        if transport.rank == 2:
            optimizer.session.wait()
            transport.close()
            return None
        rank.train(range(2, 4))
        found = tensors(optimizer.state_dict()) if transport.rank in callers else []
        rank.train(range(4, 6))
        return found, rank.values(), optimizer.session.steps

    *found, _ = local_world(3, work, options=Options(timeout_s=10.0, silence_s=1.0))
    states = [state for state, *_ in found if state]
    assert len(states) == len(callers)
    for state, (_, ours, steps) in zip(states, found, strict=False):
        assert steps == 6
        assert_same(state, states[0])
        assert_same(ours, found[0][1])
    model = perceptron()
    alone = adamw(model)
    for step in range(4):
        parts = [vectors(rank, step) for rank in range(3 if step < 2 else 2)]
        plain_step(model, alone, mean_gradients(model, parts, regression))
    assert_same(states[0], tensors(alone.state_dict()))


def test_a_model_of_another_size_is_an_error_where_a_rank_only_takes_part() -> None:
    def work(transport: Transport) -> None:
        model, _, _, rank = prepared(transport, BoundedDrift())
        rank.train(2)
        model.register_buffer("other", torch.zeros(8 + 2 * transport.rank))
        if transport.rank == 0:
            model.state_dict()
        rank.train(range(2, 4))

    began = time.monotonic()
    with pytest.raises(StormError, match="32 bytes where 40 are expected"):
        local_world(2, work, options=Options(timeout_s=20.0, silence_s=1.0))
    assert time.monotonic() - began < 10.0


# --- nobody comes -----------------------------------------------------------------------------------------------------


def test_who_waits_in_vain_is_told_so_and_then_gets_an_error(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "ANNOUNCE_AFTER_S", 0.2)
    over = threading.Event()

    def work(transport: Transport) -> None:
        model = perceptron()
        prepare(model, adamw(model), policy=BoundedDrift(collective_wait_s=0.8), group=Group(transport))
        if transport.rank == 0:
            try:
                with pytest.raises(ExchangeTimeout, match=r"rank 0: model.state_dict\(\) has waited 0.8 s"):
                    model.state_dict()
            finally:
                over.set()
        over.wait(20.0)

    with caplog.at_level(logging.WARNING, "stormtorch"):
        local_world(2, work)
    messages = [each.getMessage() for each in caplog.records]
    assert any("rank 0 has waited 0 s in model.state_dict(): rank 1 computes" in each for each in messages), messages


@pytest.mark.parametrize("policy", [EXACTLY, BoundedDrift()], ids=["exact", "drift"])
def test_the_last_rank_saves_what_it_has_and_is_told_what_is_lost(
    policy: Policy, caplog: pytest.LogCaptureFixture
) -> None:
    models = [perceptron(), perceptron()]
    expected = plain(perceptron(), adamw, STEPS, world=2)

    def work(transport: Transport) -> None:
        model = models[transport.rank]
        rank = Rank(transport.rank, 2, model, adamw(model))
        prepare(model, rank.optimizer, policy=policy, group=Group(transport))
        rank.train(STEPS)
        rank.optimizer.session.wait()
        if transport.rank == 1:
            transport.close()  # without leaving first, so that it does not wait for the other rank
        else:
            time.sleep(0.3)
            assert_same(tensors(model.state_dict()), expected)

    with caplog.at_level(logging.WARNING, "stormtorch"):
        local_world(2, work)
    gone, lost = (each.getMessage() for each in caplog.records)
    assert gone == "rank 0: view 2 begins at step 3 with 1 rank; rank 1 is gone"
    assert "rank 0: the shard of rank 1 had no standby left: its parameters are the freshest copy" in lost


def test_only_the_rank_that_left_is_named_where_it_had_a_standby(caplog: pytest.LogCaptureFixture) -> None:
    gone = threading.Barrier(3)

    def work(transport: Transport) -> None:
        model, _, _, rank = prepared(transport, EXACTLY)
        rank.train(STEPS)
        rank.optimizer.session.wait()
        gone.wait(20.0)
        if transport.rank == 2:
            transport.close()
        gone.wait(20.0)
        if transport.rank != 2:
            time.sleep(0.2)
            model.state_dict()

    with caplog.at_level(logging.WARNING, "stormtorch"):
        local_world(3, work, options=Options(timeout_s=20.0))
    messages = sorted(each.getMessage() for each in caplog.records)
    assert messages == [f"rank {rank}: view 2 begins at step 3 with 2 ranks; rank 2 is gone" for rank in range(2)]


@pytest.mark.thorough
@pytest.mark.parametrize("call", ["prepare", "backward", "step", "clip", "exact"])
def test_every_call_that_waits_for_others_says_so(
    call: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "ANNOUNCE_AFTER_S", 0.2)

    def work(transport: Transport) -> None:
        late = transport.rank == 1

        def come_late(when: str) -> None:
            if late and when == call:
                time.sleep(0.6)

        model = perceptron()
        come_late("prepare")
        optimizer = adamw(model)
        prepare(model, optimizer, policy=BoundedDrift(overlap=False), group=Group(transport))
        come_late("backward")
        regression(model, vectors(transport.rank, 0)).backward()
        come_late("clip")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        come_late("step")
        optimizer.step()
        come_late("exact")
        with exact(model):
            pass

    with caplog.at_level(logging.WARNING, "stormtorch"):
        local_world(2, work, options=Options(timeout_s=20.0))
    name = {"prepare": "prepare()", "step": "optimizer.step()", "clip": "clip_grad_norm_()"}.get(call, f"{call}()")
    messages = [each.getMessage() for each in caplog.records]
    assert any(f"rank 0 has waited 0 s in {name}: rank 1" in each for each in messages), messages

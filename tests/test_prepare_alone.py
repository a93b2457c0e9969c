# mypy: disable-error-code="no-untyped-call"
# torch's own backward is untyped.
"""Calls that one rank makes alone: the others take part from where they wait, or everyone is told what is wrong."""

import logging
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

from conftest import local_world
from stormtorch import BoundedDrift, ModelAveraging, Options, exact, faults, prepare, waiting
from stormtorch.collectives import Group, barrier, receive, send
from stormtorch.errors import ExchangeTimeout, StormError
from stormtorch.policies.policy import Policy
from stormtorch.transport import Transport
from stormtorch.waiting import doing
from training import EXACTLY, Rank, adamw, assert_same, on_ranks, perceptron, plain, regression, values, vectors

pytestmark = pytest.mark.pure

STEPS = 3


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
    """Trains, with a checkpoint in the middle that some ranks make: what is in it, and where training ends."""
    rank.train(STEPS)
    found: list[torch.Tensor] = []
    if rank.rank in ranks:
        found = tensors(rank.model.state_dict()) + tensors(rank.optimizer.state_dict())
    rank.train(range(STEPS, 2 * STEPS))
    return found


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
                    with doing("what only this rank waits in"):
                        receive(group, torch.zeros(1), 0).wait()  # and takes part from there
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
        with doing("a barrier"):
            barrier(group).wait()
        return found

    local_world(2, work)


def test_a_call_between_backward_and_step_of_others_is_an_error_for_all() -> None:
    def work(rank: Rank) -> None:
        rank.train(STEPS)
        regression(rank.model, vectors(rank.rank, STEPS)).backward()
        if rank.rank == 1:
            rank.model.state_dict()
        rank.optimizer.step()
        rank.train(1)

    with pytest.raises(
        StormError, match=r"rank 1 has called model.state_dict\(\) after 3 steps, and rank \d has made 4"
    ):
        on_ranks(perceptron(), adamw, work)


def test_different_calls_at_once_are_an_error_for_all() -> None:
    def work(rank: Rank) -> None:
        rank.train(STEPS)
        (rank.model if rank.rank else rank.optimizer).state_dict()

    with pytest.raises(StormError, match=r"rank 0 has called optimizer.state_dict\(\) and rank 1 model.state_dict\(\)"):
        on_ranks(perceptron(), adamw, work, world=2)


def test_a_mean_that_one_rank_asks_for_alone_is_an_error_for_all_at_once() -> None:
    def work(rank: Rank) -> None:
        rank.train(STEPS)
        if rank.rank == 0:
            rank.model.state_dict()
        rank.train(1)

    with pytest.raises(StormError, match=r"rank 0 has called model.state_dict\(\) after 3 steps"):
        on_ranks(perceptron(), adamw, work, policy=ModelAveraging())


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
    told = [each.getMessage() for each in caplog.records]
    assert any("rank 0 has waited 0 s in model.state_dict(): rank 1 computes" in each for each in told), told


@pytest.mark.parametrize("policy", [EXACTLY, BoundedDrift()], ids=["exact", "drift"])
def test_the_last_rank_saves_what_it_has_and_is_told_how_old_that_is(
    policy: Policy, caplog: pytest.LogCaptureFixture
) -> None:
    models = [perceptron(), perceptron()]
    expected = plain(perceptron(), adamw, STEPS, world=2)

    def work(transport: Transport) -> None:
        model = models[transport.rank]
        rank = Rank(transport.rank, 2, model, adamw(model))
        prepare(model, rank.optimizer, policy=policy, group=Group(transport))
        rank.train(STEPS)
        rank.optimizer.training.wait()
        if transport.rank == 0:
            time.sleep(0.3)  # the other one says goodbye meanwhile
            assert_same(tensors(model.state_dict()), expected)

    with caplog.at_level(logging.WARNING, "stormtorch"):
        local_world(2, work)
    (told,) = (each.getMessage() for each in caplog.records)
    assert "rank 0: rank 1 takes no part any more" in told and "at most 0 steps before the last" in told


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
    told = [each.getMessage() for each in caplog.records]
    assert any(f"rank 0 has waited 0 s in {name}: rank 1" in each for each in told), told

# mypy: disable-error-code="no-untyped-call"
# torch's own backward is untyped.
"""Training loops as people write them: groups, schedules, clipping, accumulation, mixed precision."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import stormtorch
from stormtorch import EXACT, BoundedDrift, GradientAveraging, ModelAveraging
from stormtorch.policies.policy import Policy
from training import (
    WORLD,
    Optimizer,
    Rank,
    adamw,
    assert_close,
    assert_same,
    mean_gradients,
    mean_in_float32,
    on_ranks,
    perceptron,
    plain,
    plain_step,
    regression,
    sgd,
    trained,
    values,
    vectors,
)

pytestmark = pytest.mark.pure

STEPS = 8


def two_groups(model: nn.Module) -> Optimizer:
    weights = [each for each in model.parameters() if each.dim() > 1]
    others = [each for each in model.parameters() if each.dim() <= 1]
    return torch.optim.AdamW([{"params": weights, "weight_decay": 0.3}, {"params": others, "lr": 0.03}], lr=0.01)


def test_parameter_groups_keep_their_settings() -> None:
    model = perceptron()
    for ours in trained(model, two_groups, STEPS):
        assert_same(ours, plain(model, two_groups, STEPS))


SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=STEPS + 1),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step),
}


@pytest.mark.parametrize("before", [True, False], ids=["made before", "made after"])
@pytest.mark.parametrize("name", list(SCHEDULES))
def test_a_schedule_steers_the_prepared_optimizer(name: str, before: bool) -> None:
    model = perceptron()
    alone = copy.deepcopy(model)
    optimizer = two_groups(alone)
    schedule = SCHEDULES[name](optimizer)
    for step in range(STEPS):
        parts = [vectors(rank, step) for rank in range(WORLD)]
        plain_step(alone, optimizer, mean_gradients(alone, parts, regression))
        schedule.step()
    schedules: dict[int, Any] = {}

    def make(model: nn.Module) -> Optimizer:
        made = two_groups(model)
        if before:
            schedules[id(model)] = SCHEDULES[name](made)
        return made

    def work(rank: Rank) -> list[torch.Tensor]:
        ours = schedules[id(rank.model)] if before else SCHEDULES[name](rank.optimizer)
        for step in range(STEPS):
            rank.train(range(step, step + 1))
            ours.step()
        return rank.values()

    for ours in on_ranks(model, make, work):
        assert_same(ours, values(alone))


@pytest.mark.parametrize("by_name", [True, False])
def test_step_may_be_given_a_closure(by_name: bool) -> None:
    model = perceptron()

    def work(rank: Rank) -> list[torch.Tensor]:
        for step in range(STEPS):

            def closure(step: int = step) -> torch.Tensor:
                rank.optimizer.zero_grad()
                loss = regression(rank.model, vectors(rank.rank, step))
                loss.backward()
                return loss

            loss = rank.optimizer.step(closure=closure) if by_name else rank.optimizer.step(closure)
            assert loss.item() > 0.0
        return rank.values()

    for ours in on_ranks(model, adamw, work):
        assert_same(ours, plain(model, adamw, STEPS))


def test_step_may_be_given_none_where_a_closure_could_be() -> None:
    model = perceptron()

    def work(rank: Rank) -> list[torch.Tensor]:
        if rank.rank != 2:  # rank 2 has no data, and contributes no gradient
            regression(rank.model, vectors(rank.rank, 0)).backward()
        rank.optimizer.step(None)
        return rank.values()

    found = on_ranks(model, sgd, work)
    assert not torch.equal(found[0][0], values(model)[0])
    for ours in found[1:]:
        assert_same(ours, found[0])


# --- clipping ---------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("subset", [False, True], ids=["all", "some"])
@pytest.mark.parametrize("norm", [2.0, math.inf], ids=["length", "largest"])
@pytest.mark.parametrize("clip", [stormtorch.clip_grad_norm_, torch.nn.utils.clip_grad_norm_], ids=["ours", "torch's"])
def test_clipping_is_by_the_norm_over_all_ranks(
    clip: Callable[..., torch.Tensor], norm: float, subset: bool, dtype: torch.dtype
) -> None:
    model = perceptron().to(dtype)
    most = 0.05

    def chosen(model: nn.Module) -> list[nn.Parameter]:
        return list(model.parameters())[1:3] if subset else list(model.parameters())

    alone = copy.deepcopy(model).float()
    optimizer = sgd(alone)
    norms = []
    for step in range(3):
        narrow = copy.deepcopy(alone).to(dtype)
        parts = [vectors(rank, step).to(dtype) for rank in range(WORLD)]
        for parameter, gradient in zip(alone.parameters(), mean_in_float32(narrow, parts, regression), strict=True):
            parameter.grad = gradient
        norms.append(torch.nn.utils.clip_grad_norm_(chosen(alone), most, norm))
        optimizer.step()

    def work(rank: Rank) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        found = []
        for step in range(3):
            regression(rank.model, vectors(rank.rank, step).to(dtype)).backward()
            found.append(clip(chosen(rank.model), most, norm))
            rank.optimizer.step()
            rank.optimizer.zero_grad()
        return found, rank.values()

    assert all(each > most for each in norms)
    ours = on_ranks(model, sgd, work)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0.01, "atol": 1e-3}
    for found_norms, parameters in ours:
        assert_close(found_norms, norms, rtol=tolerance["rtol"])
        assert_close([each.float() for each in parameters], values(alone), **tolerance)
        assert_same(found_norms, ours[0][0])


def test_gradients_changed_by_hand_are_what_the_optimizer_sees() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = perceptron().to(dtype)

        def work(rank: Rank, by_hand: bool, dtype: torch.dtype = dtype) -> list[torch.Tensor]:
            regression(rank.model, vectors(rank.rank, 0).to(dtype)).backward()
            if by_hand:
                torch.nn.utils.clip_grad_value_(rank.model.parameters(), 0.0)
            rank.optimizer.step()
            return rank.values()

        for ours in on_ranks(model, sgd, lambda rank: work(rank, by_hand=True)):
            assert_same(ours, values(model))
        assert not torch.equal(on_ranks(model, sgd, lambda rank: work(rank, by_hand=False))[0][0], values(model)[0])


# --- accumulation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["no_sync", "every", "mixed"])
def test_gradients_of_several_backwards_add_up(how: str) -> None:
    model = perceptron()
    parts = 3

    def data(rank: int, step: int) -> torch.Tensor:
        return torch.cat([vectors(rank, parts * step + part) for part in range(parts)])

    def work(rank: Rank) -> list[torch.Tensor]:
        for step in range(STEPS):
            for part in range(parts):
                loss = regression(rank.model, vectors(rank.rank, parts * step + part)) / parts
                if how == "every" or part == parts - 1 or (how == "mixed" and part == 0):
                    loss.backward()
                else:
                    with rank.model.no_sync():
                        loss.backward()
            rank.optimizer.step()
            rank.optimizer.zero_grad()
        return rank.values()

    for ours in on_ranks(model, adamw, work):
        assert_close(ours, plain(model, adamw, STEPS, data=data))


@pytest.mark.parametrize("policy", [BoundedDrift(), GradientAveraging()], ids=["drift", "gradients"])
def test_the_attribute_by_which_ddp_is_told_not_to_synchronise_is_obeyed(policy: Policy) -> None:
    parts = 3

    def data(rank: int, step: int) -> torch.Tensor:
        return torch.cat([vectors(rank, parts * step + part) for part in range(parts)])

    def work(rank: Rank) -> list[torch.Tensor]:
        assert rank.model.require_backward_grad_sync is True
        for step in range(STEPS):
            sent = []
            for part in range(parts):
                rank.model.require_backward_grad_sync = part == parts - 1
                (regression(rank.model, vectors(rank.rank, parts * step + part)) / parts).backward()
                sent.append(rank.optimizer.session.group.transport.health()["datagrams_sent"])
            assert sent[0] == sent[1] < sent[2]
            rank.optimizer.step()
            rank.optimizer.zero_grad()
        return rank.values()

    for ours in on_ranks(perceptron(), adamw, work, policy=policy):
        assert_close(ours, plain(perceptron(), adamw, STEPS, data=data))


def test_the_models_own_zero_grad_will_do() -> None:
    model = perceptron()

    def work(rank: Rank) -> list[torch.Tensor]:
        for step in range(STEPS):
            rank.model.zero_grad()
            regression(rank.model, vectors(rank.rank, step)).backward()
            rank.optimizer.step()
        return rank.values()

    for ours in on_ranks(model, adamw, work):
        assert_same(ours, plain(model, adamw, STEPS))


# --- precision --------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("unscaling", [True, False], ids=["unscaled to clip", "as it is"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "not fused"])
@pytest.mark.parametrize("world", [2, 4])
def test_where_one_rank_overflows_all_skip_the_step(world: int, fused: bool, unscaling: bool) -> None:
    model = nn.Linear(8, 6, bias=False)  # too small for four owners: one of them owns nothing
    bad = (3, 1)  # step and rank
    make = lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)  # noqa: E731
    alone = copy.deepcopy(model)
    optimizer = make(alone)
    for step in range(STEPS):
        if step != bad[0]:
            parts = [vectors(rank, step) for rank in range(world)]
            plain_step(alone, optimizer, mean_gradients(alone, parts, regression))

    def work(rank: Rank) -> tuple[list[torch.Tensor], float]:
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for step in range(STEPS):
            loss = regression(rank.model, vectors(rank.rank, step))
            scaler.scale(loss * (torch.inf if (step, rank.rank) == bad else 1.0)).backward()
            if unscaling:
                scaler.unscale_(rank.optimizer)
                stormtorch.clip_grad_norm_(rank.model.parameters(), 1e6)
            scaler.step(rank.optimizer)
            scaler.update()
            rank.optimizer.zero_grad()
        return rank.values(), scaler.get_scale()

    whole = BoundedDrift(gradients=stormtorch.EXACT, broadcast=stormtorch.EXACT, ownership="parameters")
    for policy in (BoundedDrift(gradients=stormtorch.EXACT, broadcast=stormtorch.EXACT), whole):
        for ours, scale in on_ranks(model, make, work, world=world, policy=policy):
            assert scale == 128.0
            assert_close(ours, values(alone))
    lossy = on_ranks(model, make, work, world=world, policy=BoundedDrift(), loss=0.3)
    assert [scale for _, scale in lossy] == [128.0] * world


def test_what_a_float16_wire_cannot_carry_is_an_overflow_for_all() -> None:
    model = perceptron()

    def work(rank: Rank) -> list[torch.Tensor]:
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        loss = regression(rank.model, vectors(rank.rank, 0)) * (1e7 if rank.rank == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(rank.optimizer)
        scaler.update()
        assert scaler.get_scale() == 0.5
        return rank.values()

    policy = BoundedDrift(gradients=stormtorch.EXACT, broadcast=stormtorch.EXACT, wire=torch.float16)
    for ours in on_ranks(model, sgd, work, policy=policy):
        assert_same(ours, values(model))


def test_autocast_gives_what_it_gives_in_one_process() -> None:
    model = perceptron()

    def narrow(model: nn.Module, given: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return regression(model, given)

    for ours in trained(model, adamw, STEPS, objective=narrow):
        assert_same(ours, plain(model, adamw, STEPS, objective=narrow))


def test_a_bfloat16_model_is_trained_by_float32_masters() -> None:
    model = perceptron().bfloat16()
    steps = 30

    def make(model: nn.Module) -> Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-4)  # too little for bfloat16 to show single updates

    masters = copy.deepcopy(model).float()
    narrow = copy.deepcopy(model)
    optimizer = make(masters)
    for step in range(steps):
        parts = [vectors(rank, step).bfloat16() for rank in range(WORLD)]
        plain_step(masters, optimizer, mean_in_float32(narrow, parts, regression))
        with torch.no_grad():
            for parameter, master in zip(narrow.parameters(), masters.parameters(), strict=True):
                parameter.copy_(master)
    found = trained(model, make, steps, data=lambda rank, step: vectors(rank, step).bfloat16())
    for ours in found:
        assert_same(ours, values(narrow))
    assert not torch.equal(found[0][0], values(model)[0])


# --- parameters read outside modules ----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [BoundedDrift(), ModelAveraging()], ids=["drift", "averaging"])
def test_parameters_may_be_read_as_soon_as_step_has_returned(policy: Policy) -> None:
    def work(rank: Rank) -> None:
        for step in range(3):
            rank.train(range(step, step + 1))
            at_once = values(rank.model)
            rank.optimizer.session.wait()
            assert_same(at_once, values(rank.model))

    on_ranks(perceptron(), adamw, work, policy=policy)


def test_a_moving_average_of_the_model_is_that_of_one_process() -> None:
    ema = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)

    def work(rank: Rank) -> list[torch.Tensor]:
        averaged = torch.optim.swa_utils.AveragedModel(copy.deepcopy(rank.model), multi_avg_fn=ema)
        for step in range(STEPS):
            rank.train(range(step, step + 1))
            averaged.update_parameters(rank.model)
        return values(averaged)

    model = perceptron()
    averaged = torch.optim.swa_utils.AveragedModel(copy.deepcopy(model), multi_avg_fn=ema)
    optimizer = adamw(model)
    for step in range(STEPS):
        parts = [vectors(rank, step) for rank in range(WORLD)]
        plain_step(model, optimizer, mean_gradients(model, parts, regression))
        averaged.update_parameters(model)
    for ours in on_ranks(perceptron(), adamw, work, policy=BoundedDrift(gradients=EXACT, broadcast=EXACT)):
        assert_same(ours, values(averaged))

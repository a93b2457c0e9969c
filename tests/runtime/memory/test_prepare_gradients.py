# mypy: disable-error-code="no-untyped-call"
# torch's own backward is untyped.
"""The program's changes to `p.grad` between backward and step reach the optimizer, whichever rank owns the shard."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from stormtorch import prepare
from stormtorch.collectives import Group
from stormtorch.exchange.simulated import SimulatedNetwork, SimulatedTransport
from survey_cases import judge
from survey_idioms import IDIOMS
from training import perceptron, regression, values, vectors
from views import EXACTLY, OPTIONS

pytestmark = pytest.mark.pure

EXACT_ONES = (
    "p.grad *= 0.5",
    "p.grad.data.mul_(0.5)",
    "p.grad = p.grad * 0.5",
    "p.grad.data = ...",
    "p.grad = None for some, momentum",
    "p.grad[...].zero_()",
    "p.grad[...] = 0",
    "p.grad.zero_() by hand",
)
NORMS = (
    "norm by hand, torch.linalg.vector_norm",
    "norm by hand, p.grad.norm()",
    "p.grad = p.grad * 0.5, then clipping",
)
SAID = ("norm by hand, (p.grad ** 2).sum()", "gradient centralisation", "sharpness-aware (SAM) by hand")


@pytest.mark.thorough
@pytest.mark.parametrize("case", ["3 ranks", "one killed"])
@pytest.mark.parametrize("name", EXACT_ONES)
def test_what_is_done_to_gradients_counts(name: str, case: str) -> None:
    assert judge(IDIOMS[name], case) == ("same bits", "")


@pytest.mark.parametrize("name", NORMS)
def test_norms_are_those_of_all_ranks(name: str) -> None:
    verdict, about = judge(IDIOMS[name], "3 ranks")
    assert verdict in ("same bits", "rounding"), about


@pytest.mark.parametrize("name", SAID)
def test_what_mixes_elements_of_gradients_is_said(name: str) -> None:
    verdict, about = judge(IDIOMS[name], "3 ranks")
    assert verdict == "documented" and "averaged only where this rank owns" in about


def trained(
    change: Callable[[nn.Module, torch.optim.Optimizer], object],
    *,
    dtype: torch.dtype = torch.float32,
    ranks: int = 3,
) -> list[torch.Tensor]:
    """Trains a few steps on a simulated network, with a change after each backward. Returns rank 0's result."""
    found: dict[int, list[torch.Tensor]] = {}
    begun = perceptron().to(dtype)

    def body(transport: SimulatedTransport) -> None:
        model = copy.deepcopy(begun)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        prepare(model, optimizer, policy=EXACTLY, group=Group(transport))
        for step in range(3):
            regression(model, vectors(transport.rank, step).to(dtype)).backward()
            change(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        found[transport.rank] = values(model)

    SimulatedNetwork(ranks, options=OPTIONS).run(body)
    return found[0]


def zero_rows(model: nn.Module, _optimizer: Any) -> None:
    for each in model.parameters():
        assert each.grad is not None
        each.grad[: len(each) // 2].zero_()


def mask_rows(model: nn.Module, _optimizer: Any) -> None:
    for each in model.parameters():
        assert each.grad is not None
        mask = torch.ones_like(each)
        mask[: len(each) // 2] = 0.0
        each.grad.mul_(mask)


def test_bfloat16_gradients_keep_their_bits_where_nothing_changed() -> None:
    one, other = (trained(change, dtype=torch.bfloat16) for change in (zero_rows, mask_rows))
    assert all(map(torch.equal, one, other))


def set_anew(model: nn.Module, _optimizer: Any) -> None:
    for each in model.parameters():
        assert each.grad is not None
        each.grad = each.grad * 0.5


def halve(model: nn.Module, _optimizer: Any) -> None:
    for each in model.parameters():
        assert each.grad is not None
        each.grad.mul_(0.5)


def test_bfloat16_gradients_that_are_replaced_count() -> None:
    one, other = (trained(change, dtype=torch.bfloat16) for change in (set_anew, halve))
    for left, right in zip(one, other, strict=True):
        torch.testing.assert_close(left, right, rtol=0.02, atol=0.002)


def through_groups(_model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for each in group["params"]:
            if each.grad is not None:
                each.grad = each.grad * 0.5


def test_gradients_of_the_optimizers_groups_count_for_the_standby_too() -> None:
    assert all(map(torch.equal, trained(through_groups), trained(halve)))


def both_places(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for each in group["params"]:
            if each.grad is not None:
                each.grad.mul_(0.5)
    set_anew(model, optimizer)


def test_changes_of_bfloat16_gradients_in_two_places_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"in place, as by p\.grad\.mul_"):
        trained(both_places, dtype=torch.bfloat16)


def own_gradient(model: nn.Module, _optimizer: Any) -> None:
    for each in model.parameters():
        each.grad = torch.full_like(each, 0.01)


def test_gradients_that_come_from_elsewhere_count_and_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "stormtorch"):
        got = trained(own_gradient, ranks=2)
    words = [each.getMessage() for each in caplog.records if "not computed from it" in each.getMessage()]
    assert len(words) == 2
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(3):
        own_gradient(model, optimizer)
        optimizer.step()
    assert all(map(torch.equal, got, values(model)))


def test_an_unscaled_gradient_may_be_replaced() -> None:
    def scaled(change: Callable[[nn.Module, Any], object], before: bool) -> list[torch.Tensor]:
        scalers: dict[int, torch.amp.GradScaler] = {}

        def unscale(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            scaler = scalers.setdefault(id(model), torch.amp.GradScaler("cpu", init_scale=4.0))
            scaler.scale(torch.ones(()))
            if before:
                change(model, optimizer)
            scaler.unscale_(optimizer)
            if not before:
                change(model, optimizer)
            scaler.update()

        return trained(unscale)

    expected = scaled(halve, before=False)
    assert all(map(torch.equal, expected, scaled(set_anew, before=False)))
    assert all(map(torch.equal, expected, scaled(set_anew, before=True)))


def test_hooks_that_come_after_prepare_act_before_gradients_leave() -> None:
    left: list[torch.Tensor] = []

    def clear(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.zero_()

    def body(transport: SimulatedTransport) -> None:
        model = perceptron()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
        prepare(model, optimizer, policy=EXACTLY, group=Group(transport))
        gradients = optimizer.session._gradients
        start = gradients._start

        def starting(bucket: Any) -> None:
            left.append(bucket.grads.clone())
            start(bucket)

        gradients._start = starting
        for each in model.parameters():
            each.register_post_accumulate_grad_hook(clear)
        for step in range(2):
            regression(model, vectors(transport.rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()

    SimulatedNetwork(2, options=OPTIONS).run(body)
    assert left
    assert not any(each.any() for each in left)

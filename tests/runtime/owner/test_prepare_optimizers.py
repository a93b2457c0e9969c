"""Sharded optimizers: any optimizer works on shards as on a whole model, or is refused with a reason."""

from abc import ABC
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import pytest
import torch
from torch import nn

from stormtorch import EXACT, BoundedDrift, Options
from training import (
    Optimizer,
    Rank,
    adamw,
    assert_close,
    assert_same,
    on_ranks,
    perceptron,
    plain,
    trained,
    values,
)

pytestmark = pytest.mark.pure

STEPS = 6
Kind = TypeVar("Kind")


class Lion(Optimizer):
    """As users write them: no foreach, state made when it is first needed."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as users write it
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                one, other = group["betas"]
                parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
                parameter.add_(state["momentum"].lerp(parameter.grad, 1.0 - one).sign(), alpha=-group["lr"])
                state["momentum"].lerp_(parameter.grad, 1.0 - other)


class Named(Protocol):
    """A protocol that an optimizer implements."""

    def name(self) -> str: ...


class Abstract(ABC, torch.optim.AdamW):
    """As all of pytorch_optimizer are: bases without attributes come before `Optimizer`."""


class OfKind(Generic[Kind], torch.optim.AdamW):
    pass


class WithName(Named, torch.optim.AdamW):
    def name(self) -> str:
        return "one"


BY_ELEMENTS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "sgd nesterov": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd foreach": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
    "sgd fused": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, weight_decay=0.01),
    "adam foreach": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True, foreach=True),
    "adam fused": lambda params: torch.optim.Adam(params, lr=0.01, fused=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "adamw, with ABC before it": lambda params: Abstract(params, lr=0.01),
    "adamw, with Generic before it": lambda params: OfKind[int](params, lr=0.01),
    "adamw, with Protocol before it": lambda params: WithName(params, lr=0.01),
    "adamw foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "adamw fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "adamw tensor lr": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.01)),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
    "adagrad fused": lambda params: torch.optim.Adagrad(params, lr=0.01, fused=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.5, centered=True),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "radam": lambda params: torch.optim.RAdam(params, lr=0.01),
    "adamax": lambda params: torch.optim.Adamax(params, lr=0.01),
    "adadelta": lambda params: torch.optim.Adadelta(params, lr=1.0),
    "asgd": lambda params: torch.optim.ASGD(params, lr=0.01),
    "rprop": lambda params: torch.optim.Rprop(params, lr=0.01),
}
WHOLE: dict[str, Callable[[Any], Optimizer]] = {
    "lion": Lion,
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.05),
    "muon": lambda params: torch.optim.Muon([each for each in params if each.dim() == 2], lr=0.02),
}
# Vectorised kernels round the last few elements of a tensor differently, and shards end at other elements.
ROUNDED = ("fused",)


def exactly(ownership: Any = "auto") -> BoundedDrift:
    return BoundedDrift(gradients=EXACT, broadcast=EXACT, ownership=ownership)


def pieces_are_whole(rank: Rank) -> bool:
    """Whether the optimizer has tensors of the model's shapes."""
    shapes = {each.shape for each in rank.model.parameters()}
    return all(each.shape in shapes for group in rank.optimizer.param_groups for each in group["params"][:-1])


@pytest.mark.thorough
@pytest.mark.parametrize("name", [*BY_ELEMENTS, *WHOLE])
def test_an_optimizer_gives_what_it_gives_in_one_process(name: str) -> None:
    model = perceptron()
    make = lambda model: {**BY_ELEMENTS, **WHOLE}[name](model.parameters())  # noqa: E731
    theirs = plain(model, make, STEPS)
    compare = assert_close if name.endswith(ROUNDED) else assert_same
    for ours in trained(model, make, STEPS, policy=exactly()):
        compare(ours, theirs)
    assert not torch.equal(theirs[0], values(model)[0])


@pytest.mark.parametrize("name", ["adamw", *WHOLE])
def test_an_optimizer_that_may_look_at_whole_parameters_is_given_whole_ones(name: str) -> None:
    make = lambda model: {**BY_ELEMENTS, **WHOLE}[name](model.parameters())  # noqa: E731
    found = on_ranks(perceptron(), make, pieces_are_whole, policy=exactly())
    assert all(found) == (name in WHOLE)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["lion", "adamw", "nadam"])
def test_by_elements_or_by_parameters_is_the_same(name: str) -> None:
    model = perceptron()
    make = lambda model: {**BY_ELEMENTS, **WHOLE}[name](model.parameters())  # noqa: E731
    one = trained(model, make, STEPS, policy=exactly("elements"))
    other = trained(model, make, STEPS, policy=exactly("parameters"))
    for ours, theirs in zip(one, other, strict=True):
        assert_same(ours, theirs)
    assert not all(on_ranks(model, make, pieces_are_whole, policy=exactly("elements")))


def test_optimizers_that_cannot_work_on_shards_are_refused() -> None:
    def lbfgs(model: nn.Module) -> Optimizer:
        return torch.optim.LBFGS(model.parameters())

    def sparse_adam(model: nn.Module) -> Optimizer:
        return torch.optim.SparseAdam(list(model.parameters()))

    for make, reason in ((lbfgs, "in the middle of a step"), (sparse_adam, "sparse gradients")):
        with pytest.raises(ValueError, match=reason):
            on_ranks(perceptron(), make, lambda rank: None)


def test_adagrads_state_of_a_bfloat16_model_is_float32_as_its_masters_are() -> None:
    def work(rank: Rank) -> set[torch.dtype]:
        rank.train(1, data=lambda rank, step: torch.randn(4, 8).bfloat16())
        state = rank.optimizer.state_dict()["state"].values()
        return {one["sum"].dtype for one in state}

    make = lambda model: torch.optim.Adagrad(model.parameters())  # noqa: E731
    for found in on_ranks(perceptron().bfloat16(), make, work):
        assert found == {torch.float32}


def test_state_exists_once_in_the_world() -> None:
    model = perceptron(inside=200)
    total = sum(each.numel() for each in model.parameters())

    def work(rank: Rank) -> int:
        rank.train(2)
        states = torch.optim.Optimizer.state_dict(rank.optimizer)["state"].values()
        return sum(one["exp_avg"].numel() for one in states)

    found = on_ranks(model, adamw, work)
    assert sum(found) == total
    assert max(found) < 1.1 * total / 4


def test_no_parameter_group_can_be_added_later() -> None:
    def work(rank: Rank) -> None:
        with pytest.raises(RuntimeError, match="before"):
            rank.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})

    on_ranks(perceptron(), adamw, work)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["adamw fused", "lion", "muon"])
def test_training_under_loss_learns(name: str) -> None:
    def work(rank: Rank) -> list[float]:
        return rank.train(60)

    make = lambda model: {**BY_ELEMENTS, **WHOLE}[name](model.parameters())  # noqa: E731
    network: dict[str, Any] = {"loss": 0.1, "options": Options(datagram_bytes=256)}
    for losses in on_ranks(perceptron(), make, work, policy=BoundedDrift(), **network):
        assert sum(losses[-10:]) < 0.8 * sum(losses[:10])

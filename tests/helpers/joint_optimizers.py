# mypy: disable-error-code="override"
# Steps take closures as users write them.
"""Optimizers that look beyond single parameters, each as published ones do, and some that only look as if they did."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

Optimizer = torch.optim.Optimizer


class _Plain(Optimizer):
    """SGD; what others change."""

    def __init__(self, params: Any, lr: float = 0.01, **settings: Any) -> None:
        super().__init__(params, {"lr": lr, **settings})

    def given(self) -> list[nn.Parameter]:
        return [each for group in self.param_groups for each in group["params"] if each.grad is not None]

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for each in group["params"]:
                    if each.grad is not None:
                        each.sub_(self.update(each, group), alpha=group["lr"])

    def update(self, parameter: nn.Parameter, _group: dict[str, Any]) -> torch.Tensor:
        assert parameter.grad is not None
        return parameter.grad


class ClipsInStep(_Plain):
    """Clips all gradients by the norm of all of them, as Lamb does."""

    def step(self, closure: Any = None) -> None:
        torch.nn.utils.clip_grad_norm_(self.given(), 1.0)
        super().step()


class DecaysByTheMean(_Plain):
    """A small decay, by the mean over all parameters of squares, as AdamS has."""

    def update(self, parameter: nn.Parameter, group: dict[str, Any]) -> torch.Tensor:
        squares = torch.stack([each.grad.square().mean() for each in self.given() if each.grad is not None])
        return super().update(parameter, group) + 1e-6 * parameter / squares.mean().sqrt()


class Projection:
    """An object of a class, as GaLore keeps one for each matrix."""


class KeepsAnObject(_Plain):
    """Keeps in its state what is neither a tensor nor a number."""

    def update(self, parameter: nn.Parameter, group: dict[str, Any]) -> torch.Tensor:
        self.state[parameter].setdefault("projector", Projection())
        return super().update(parameter, group)


class ByTheirNumber(_Plain):
    """Divides by the number of parameters."""

    def update(self, parameter: nn.Parameter, group: dict[str, Any]) -> torch.Tensor:
        return super().update(parameter, group) / len(self.given())


class FindsItsRate(_Plain):
    """Sums over all parameters in a setting of the group, from which the step follows only later, as Prodigy's."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, d_numerator=0.0, d=1e-6)

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            group["d_numerator"] += sum(float(each.grad.sum()) for each in self.given() if each.grad is not None)


class SharpnessAware(_Plain):
    """Calls the closure where the gradient has led uphill, as SAM does."""

    def step(self, closure: Any = None) -> None:
        assert closure is not None, "a closure is needed"
        before = [each.detach().clone() for each in self.given()]
        with torch.no_grad():
            for each in self.given():
                each.add_(each.grad, alpha=0.05)  # type: ignore[arg-type]  # `given` has them
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            for each, old in zip(self.given(), before, strict=True):
                each.copy_(old)
        super().step()


class Stacked(_Plain):
    """Keeps the momentum of all parameters of one shape in the state of the first, as some Muons do."""

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                if params := [each for each in group["params"] if each.grad is not None]:
                    shapes = sorted({tuple(each.shape) for each in params})
                    for shape in shapes:
                        self._step([each for each in params if tuple(each.shape) == shape], group["lr"])

    def _step(self, params: list[nn.Parameter], lr: float) -> None:
        gradients = torch.stack([each.grad for each in params])  # type: ignore[misc]  # each has one
        momentum = self.state[params[0]].setdefault("momentum", torch.zeros_like(gradients))
        momentum.lerp_(gradients, 0.1)
        for each, update in zip(params, momentum, strict=True):
            each.sub_(update, alpha=lr)


class Gathers(_Plain):
    """Shares the work of a step among ranks by a collective, as distributed Muons do; from a step on."""

    def __init__(self, params: Any, *, begins_at: int = 0) -> None:
        super().__init__(params)
        self.begins_at, self.steps = begins_at, 0

    def step(self, closure: Any = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        if self.steps >= self.begins_at:
            for each in self.given():
                dist.all_reduce(each.grad)
        self.steps += 1
        super().step()


class ClipsEach(_Plain):
    """Clips every gradient by its own norm, which needs whole parameters only; draws noise; needs a closure."""

    def step(self, closure: Any = None) -> None:
        if closure is None:
            raise RuntimeError("a closure is needed")
        with torch.enable_grad():
            closure()
        for each in self.given():
            torch.nn.utils.clip_grad_norm_(each, 1.0)
            each.grad.add_(1e-3 * torch.randn_like(each))  # type: ignore[union-attr]  # `given` has them
        super().step()


class Around(Optimizer):
    """An optimizer around another, whose groups it shares; made by other arguments than torch's."""

    def __init__(self, inner: Optimizer, reason: str) -> None:
        self.inner, self.reason = inner, reason
        super().__init__([{"params": each["params"]} for each in inner.param_groups], {})
        self.param_groups = inner.param_groups

    def step(self, closure: Any = None) -> None:
        self.inner.step()

"""One training step in several styles of user code: GradScaler or closure, hooks, changes by `.data`.

Then a second model, prepared separately, makes a step, as in a GAN. The style of a step depends only on its number,
so all ranks do the same, including those that join later.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from stormtorch.policies.policy import OwnerPolicy, Policy
from stormtorch.runtime.memory.gradient_norms import clip_grad_norm_
from stormtorch_lab.tasks.task import seeded

_CLOSURE_EVERY, _CLAMP_EVERY = 10, 5
_MOST_WEIGHT, _MOST_GRADIENT = 1.0, 0.5
_WIDTH, _LR, _MOMENTUM = 16, 0.5, 0.9
# A restarted process begins with torch's default scale, 64 times that of the others.
_SCALES = (2.0**10, 2.0**16)


def second_model(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Makes a bigram model of bytes, and its optimizer."""
    model = seeded(seed, lambda: nn.Sequential(nn.Embedding(256, _WIDTH), nn.Linear(_WIDTH, 256)))
    return model, torch.optim.SGD(model.parameters(), lr=_LR, momentum=_MOMENTUM)


class Program:
    """The body of a training loop.

    Args:
        models: The prepared models; the first one is the main one.
        optimizers: Their optimizers.
        policy: Policy of the training; not all policies allow all styles.
        again: Whether this process was restarted.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        policy: Policy,
        *,
        again: bool,
    ) -> None:
        self._model, self._optimizer = models[0], optimizers[0]
        self._others = list(zip(models, optimizers, strict=True))[1:]
        # Under a deadline, stand-ins make the step of a late rank without running its program.
        self._varied = isinstance(policy, OwnerPolicy) and policy.deadline is None
        self._scaler = torch.amp.GradScaler("cpu", init_scale=_SCALES[again], enabled=self._varied)
        if self._varied:
            self._optimizer.register_step_pre_hook(_clamp_gradients)

    def step(self, number: int, last: bool, loss_of: Callable[[nn.Module], torch.Tensor]) -> float:
        """Makes a step of each model, and returns the loss of the first.

        Args:
            number: Number of the step.
            last: Whether it is the last one.
            loss_of: Computes the loss of a model.
        """
        if self._varied and number % _CLOSURE_EVERY == _CLOSURE_EVERY - 1:
            loss = self._by_closure(loss_of)
        else:
            loss = loss_of(self._model)
            self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]  # torch's
            self._scaler.unscale_(self._optimizer)
            clip_grad_norm_(self._model.parameters(), 1.0)
            self._scaler.step(self._optimizer)
            self._scaler.update()
        if self._varied and number % _CLAMP_EVERY == 0 and not last:
            for each in self._model.parameters():
                each.data.clamp_(-_MOST_WEIGHT, _MOST_WEIGHT)
        self._optimizer.zero_grad()
        for model, optimizer in self._others:
            loss_of(model).backward()  # type: ignore[no-untyped-call]  # torch's
            optimizer.step()
            optimizer.zero_grad()
        return float(loss.detach())

    def _by_closure(self, loss_of: Callable[[nn.Module], torch.Tensor]) -> torch.Tensor:
        def closure() -> torch.Tensor:
            self._optimizer.zero_grad()
            loss = loss_of(self._model)
            loss.backward()  # type: ignore[no-untyped-call]  # torch's
            clip_grad_norm_(self._model.parameters(), 1.0)
            return loss

        loss: Any = self._optimizer.step(closure)  # type: ignore[arg-type]  # torch's says that it returns a float
        found: torch.Tensor = loss
        return found

    def scale(self) -> float | None:
        """Loss scale, if there is one."""
        return self._scaler.get_scale() if self._varied else None


def _clamp_gradients(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for each in group["params"]:
            if each.grad is not None:
                each.grad.clamp_(-_MOST_GRADIENT, _MOST_GRADIENT)

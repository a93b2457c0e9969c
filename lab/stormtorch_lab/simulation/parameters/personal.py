"""Personal parameters of virtual workers: each worker has its own values, gradients and optimizer for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from stormtorch_lab.simulation.parameters.chunks import Chunks

# Never exchanged, so a chunk can have any size: the smallest has padding only between parameters.
_PER_CHUNK = 16


class Personal:
    """The personal parameters of this process's workers; there may be none.

    Args:
        parameters: Trained personal parameters, with the initial values of all workers.
        workers: Number of workers of this process, W.
        device: Device of all tensors.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], workers: int, device: torch.device) -> None:
        self.chunks = Chunks.of(parameters, 1, _PER_CHUNK)
        """Layout of the parameters in a worker's vector."""
        self.values = self.chunks.empty(workers, device=device)
        """Values of all workers, (W, C, E)."""
        self.grads = self.chunks.empty(workers, device=device)
        """Gradients of all workers, (W, C, E)."""
        self.used = torch.zeros(workers, len(parameters), dtype=torch.bool)
        """Whether each worker's loss depended on each parameter; otherwise its optimizer skips it."""
        self._own: list[list[nn.Parameter]] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        """One optimizer for each worker; none if there are no parameters."""
        self.begin(parameters)

    def begin(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sets the values of all workers to those of some parameters, and removes the optimizers."""
        for stacked, parameter in zip(self.chunks.views(self.values), parameters, strict=True):
            stacked.copy_(parameter.detach().expand_as(stacked))
        self._own, self.optimizers = [], []

    def make_optimizers(self, make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]) -> None:
        """Makes the optimizers of all workers."""
        if not self.chunks.shapes:
            return
        for values in self.values:
            own = [nn.Parameter(each) for each in self.chunks.views(values)]
            for parameter, each in zip(own, self.chunks.views(values), strict=True):
                parameter.data = each  # shares the memory, whatever Parameter's constructor does
            self._own.append(own)
            self.optimizers.append(make(own))

    def step(self, works_W: torch.Tensor, clip: float | None) -> None:
        """Makes a step of the given workers, each clipped by the norm of its own gradients."""
        if clip is not None:
            norm_W = torch.linalg.vector_norm(self.grads, dim=(1, 2))
            self.grads.mul_((clip / (norm_W + 1e-6)).clamp(max=1.0).view(-1, 1, 1))
        for worker, (own, optimizer) in enumerate(zip(self._own, self.optimizers, strict=True)):
            if works_W[worker]:
                grads = self.chunks.views(self.grads[worker])
                for parameter, grad, used in zip(own, grads, self.used[worker].tolist(), strict=True):
                    parameter.grad = grad if used else None
                optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {"values": self.values, "optimizers": [each.state_dict() for each in self.optimizers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from the state of a checkpoint."""
        self.values.copy_(state["values"])
        for own, saved in zip(self.optimizers, state["optimizers"], strict=True):
            own.load_state_dict(saved)

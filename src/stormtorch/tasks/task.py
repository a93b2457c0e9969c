"""What tasks of virtual workers have in common: what the simulator asks of them, and how most of them answer."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional

from stormtorch.tasks.batches import Batch, adamw, loss_of, rate_at
from stormtorch.tasks.data.atis import PADDING


class Task(Protocol):
    """Something that can be learned by many workers."""

    name: str
    language: bool
    """Whether it is one that perplexity is the measure of."""
    clip: float | None
    """The longest gradient that is applied; None takes any."""
    lr: float
    """The highest learning rate."""
    device: torch.device
    """Where batches are, and where models are judged."""

    def model(self, seed: int) -> nn.Module:
        """The same weights for the same seed, on the CPU."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Mean loss of one worker's batch. `torch.func.vmap` takes it, but for the model `lstm`."""
        ...

    def optimizer(self, parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        """For these parameters, one worker's or stacked: it treats each element by itself."""
        ...

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of a step out of so many."""
        ...

    def batches(self, seed: int, step: int, workers: int, first: int, last: int) -> Batch:
        """What workers `first` to `last - 1` of all learn from in a step: (W, B, ...), on the device.

        It depends on seed, step and the workers' numbers, not on who else is asked for.
        """
        ...

    def evaluate(self, model: nn.Module) -> tuple[float, float]:
        """Loss on what is held out, and the fraction of it that the model says right; the model is on the device."""
        ...

    def to_json(self) -> dict[str, object]:
        """What is learned, and from what."""
        ...


class Learned(ABC):
    """What tasks share."""

    language = False
    clip: float | None = 1.0

    def __init__(self, name: str, device: torch.device, batch: int, lr: float) -> None:
        self.name = name
        self.device = device
        self.lr = lr
        self._batch = batch
        self._facts: dict[str, object] = {}

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Mean cross-entropy."""
        return loss_of(model(batch.inputs), batch.targets)

    def optimizer(self, parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        """AdamW."""
        return adamw(parameters, self.lr)

    def rate(self, step: int, steps: int) -> float:
        """Up in the first twentieth, then down to a tenth as a cosine."""
        return rate_at(step, steps, self.lr)

    def evaluate(self, model: nn.Module) -> tuple[float, float]:
        """Loss and right answers, counted over all that is asked about."""
        learning = model.training
        model.eval()
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        with torch.no_grad():
            for inputs, targets in self._held_out():
                scores = model(inputs)
                # Not by boolean indexing, which would wait for the device.
                asked = targets != PADDING
                losses = functional.cross_entropy(
                    scores.flatten(0, -2), targets.flatten(), ignore_index=PADDING, reduction="sum"
                )
                right = (scores.argmax(-1) == targets) & asked
                sums += torch.stack((losses.double(), right.sum().double(), asked.sum().double()))
        model.train(learning)
        loss, right_sum, count = sums.tolist()
        return loss / count, right_sum / count

    def to_json(self) -> dict[str, object]:
        """The settings, and what is known of the data."""
        return {"model": self.name, "batch": self._batch, "lr": self.lr, **self._facts}

    @abstractmethod
    def _held_out(self) -> Iterator[Batch]:
        """What the model is judged by, in parts."""

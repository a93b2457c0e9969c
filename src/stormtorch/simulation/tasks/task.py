"""What tasks of virtual workers have in common: what the simulator asks of them, and how most of them answer."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional

from stormtorch.training.atis import PADDING
from stormtorch.training.tasks import Batch, generator_of, loss_of, rate_at


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
        """AdamW, as LLaMA's authors have it."""
        return torch.optim.AdamW(parameters, lr=self.lr, betas=(0.9, 0.95), weight_decay=0.1)

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


class Epochs:
    """Which examples a step has: each once in an epoch, for one worker; the last few that fill no step sit it out."""

    def __init__(self, count: int, batch: int) -> None:
        self._count = count
        self._batch = batch
        self._order: tuple[tuple[int, int], torch.Tensor] | None = None

    def chosen(self, seed: int, step: int, workers: int) -> torch.Tensor:
        """Numbers of examples, (W, B), of all workers."""
        together = workers * self._batch
        epoch, within = divmod(step, max(self._count // together, 1))
        if self._order is None or self._order[0] != (seed, epoch):
            self._order = (seed, epoch), torch.randperm(self._count, generator=generator_of(seed, epoch, 0))
        places = (within * together + torch.arange(together)) % self._count
        return self._order[1][places].view(workers, self._batch)


def seeded(seed: int, make: Callable[[], nn.Module]) -> nn.Module:
    """What is made of random numbers of a seed, and leaves those of all others as they are."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        return make()

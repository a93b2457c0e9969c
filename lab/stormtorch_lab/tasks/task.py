"""The interface of a task: a model, its optimizer, training batches, and held-out examples.

The same tasks run on ranks, which use the batch of one worker, and in the simulator, which uses the stacked batches of
many workers.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from stormtorch_lab.tasks.data.batches import PADDING, Batch

CPU = torch.device("cpu")

Schedule = Callable[[int, int, float], float]
"""Learning rate of a step, given the step, the number of steps, and the highest rate."""


class Score(NamedTuple):
    """Sums over held-out examples, so that the sums of several parts can be added."""

    loss: float
    """Sum of the losses, in nats."""
    right: float
    """Number of right answers."""
    answers: float
    """Number of all answers."""


def cosine(step: int, steps: int, highest: float) -> float:
    """Raise the rate during the first twentieth of the steps, then lower it to a tenth along a cosine."""
    warmup = max(steps // 20, 1)
    if step < warmup:
        return highest * (step + 1) / warmup
    done = (step - warmup) / max(steps - warmup, 1)
    return highest * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)


def staircase(step: int, steps: int, highest: float) -> float:
    """Raise the rate during the first twentieth; divide it by ten at half of the steps and again at three quarters."""
    warmup = max(steps // 20, 1)
    if step < warmup:
        return highest * (step + 1) / warmup
    return highest * (1.0 if 2 * step < steps else 0.1 if 4 * step < 3 * steps else 0.01)


def adamw(parameters: Iterable[torch.Tensor], lr: float) -> torch.optim.Optimizer:
    """Make AdamW with the settings of LLaMA's authors."""
    return torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.1)


def cross_entropy(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over all targets, in nats."""
    return functional.cross_entropy(scores.flatten(0, -2), targets.flatten())


def seeded(seed: int, make: Callable[[], nn.Module]) -> nn.Module:
    """Make a model with the random numbers of a seed; the global generator stays as it was."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        return make()


class Task(ABC):
    """A model and the data that it learns from.

    Args:
        name: Name of the model.
        batch: Examples of each worker in a step.
        lr: Highest learning rate.
        schedule: How the learning rate changes from step to step.
        device: Device that holds the data, and on which models are judged.
    """

    language = False
    """Whether perplexity measures the result; otherwise accuracy does."""
    clip: float | None = 1.0
    """Norm to which larger gradients are clipped; None clips none."""

    def __init__(
        self, name: str, *, batch: int, lr: float, schedule: Schedule = cosine, device: torch.device = CPU
    ) -> None:
        self.name = name
        self.lr = lr
        self.device = device
        self._batch = batch
        self._schedule = schedule

    @abstractmethod
    def model(self, seed: int) -> nn.Module:
        """Make the model on the CPU: the same weights for the same seed, in every process."""

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Mean loss of one worker's batch, in nats. `torch.func.vmap` can run it, except for the model `lstm`."""
        return cross_entropy(model(batch.inputs), batch.targets)

    def optimizer(self, parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        """Make an optimizer that treats each element by itself, so that parameters may be stacked workers'."""
        return adamw(parameters, self.lr)

    def rate(self, step: int, steps: int) -> float:
        """Learning rate of one step out of `steps`."""
        return self._schedule(step, steps, self.lr)

    def batch(self, seed: int, step: int, worker: int, workers: int) -> Batch:
        """One worker's batch in a step: (B, ...), on the device."""
        inputs_WB, targets_WB = self.batches(seed, step, workers, worker, worker + 1)
        return Batch(inputs_WB[0], targets_WB[0])

    @abstractmethod
    def batches(self, seed: int, step: int, workers: int, first: int, last: int) -> Batch:
        """Stack the batches of workers `first` to `last - 1`: (W, B, ...), on the device.

        They depend on the seed, the step, the number of workers and the worker, not on which workers are asked for.
        """

    @abstractmethod
    def held_out(self, part: int = 0, parts: int = 1) -> Iterator[Batch]:
        """Batches of held-out examples: one of `parts` parts that share no example."""

    def score(self, model: nn.Module, part: int = 0, parts: int = 1) -> Score:
        """Judge a model that is on the device by one part of the held-out examples."""
        was_training = model.training
        model.eval()
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        with torch.no_grad():
            for inputs, targets in self.held_out(part, parts):
                scores = model(inputs)
                # A mask instead of boolean indexing, which would wait for the device.
                asked = targets != PADDING
                losses = functional.cross_entropy(
                    scores.flatten(0, -2), targets.flatten(), ignore_index=PADDING, reduction="sum"
                )
                right = (scores.argmax(-1) == targets) & asked
                sums += torch.stack((losses.double(), right.sum().double(), asked.sum().double()))
        model.train(was_training)
        return Score(*sums.tolist())

    def evaluate(self, model: nn.Module) -> tuple[float, float]:
        """Mean loss on all held-out examples, and the fraction of right answers."""
        score = self.score(model)
        return score.loss / score.answers, score.right / score.answers

    def to_json(self) -> dict[str, object]:
        """Describe the task and, under the key `data`, its data."""
        return {"model": self.name, "batch": self._batch, "lr": self.lr}

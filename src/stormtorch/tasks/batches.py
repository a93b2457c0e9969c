"""What is learned: a model, an optimizer, batches, and what is held out; on every rank alike but for the batches."""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import nn
from torch.nn import functional

from stormtorch.tasks.data.corpus import Corpus, open_corpus
from stormtorch.tasks.data.images import CLASSES, Images, open_images
from stormtorch.tasks.models.llama import Llama, LlamaSize
from stormtorch.tasks.models.resnet import ResNet

_VALIDATION_SEQUENCES = 128
_VALIDATION_BATCH = 64


class Batch(NamedTuple):
    """Examples, and what should be said of them."""

    inputs: torch.Tensor
    targets: torch.Tensor


class Task(Protocol):
    """Something that can be learned."""

    language: bool
    """Whether it is one that perplexity is the measure of."""
    clip: float | None
    """The longest gradient that is applied; None takes any."""

    def model(self, seed: int) -> nn.Module:
        """The same weights for the same seed, in every process."""
        ...

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """For all parameters of the model."""
        ...

    def batch(self, seed: int, step: int, rank: int) -> Batch:
        """A rank's part of a step: it depends on nothing else."""
        ...

    def validation(self, rank: int) -> Iterator[Batch]:
        """A rank's part of what is held out."""
        ...

    def to_json(self) -> dict[str, object]:
        """What is learned from."""
        ...


def open_language(
    text: Path | None = None, *, ranks: int, batch: int, lr: float, context: int, layers: int, width: int
) -> Task:
    """Reads a text and makes the task of learning its next byte.

    Args:
        text: File to learn from; None is the source of Python's standard library.
        ranks: Ranks that learn together.
        batch: Examples of each rank in a step.
        lr: Highest learning rate.
        context: Bytes of each example.
        layers: Layers of the model.
        width: Width of the model.

    Raises:
        stormtorch.checks.BadSetting: The text cannot be read.
    """
    size = LlamaSize(layers=layers, width=width, heads=max(width // 32, 1))
    return _Language(open_corpus(text), size, ranks, batch, lr, context)


def open_pictures(cifar10: Path | None = None, *, ranks: int, batch: int, lr: float) -> Task:
    """Reads pictures and makes the task of telling them apart.

    Args:
        cifar10: Folder of CIFAR-10's Python version; None takes scikit-learn's digits, 8 x 8.
        ranks: Ranks that learn together.
        batch: Examples of each rank in a step.
        lr: Highest learning rate.

    Raises:
        stormtorch.checks.BadSetting: The pictures cannot be read.
    """
    return _Pictures(open_images(cifar10), ranks, batch, lr)


def loss_of(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy, in nats."""
    return functional.cross_entropy(scores.flatten(0, -2), targets.flatten())


def rate_at(step: int, steps: int, highest: float) -> float:
    """The learning rate: up in the first twentieth, then down to a tenth as a cosine."""
    warmup = max(steps // 20, 1)
    if step < warmup:
        return highest * (step + 1) / warmup
    done = (step - warmup) / max(steps - warmup, 1)
    return highest * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)


def adamw(parameters: Iterable[torch.Tensor], lr: float) -> torch.optim.Optimizer:
    """AdamW as LLaMA's authors have it."""
    return torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.1)


def seeded(seed: int, make: Callable[[], nn.Module]) -> nn.Module:
    """What is made with the random numbers of a seed; all others stay as they were."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        return make()


class Epochs:
    """Which examples a step has: each once in an epoch, for one rank; the last few that fill no step sit it out.

    Args:
        count: Examples in all.
        batch: Examples of each rank in a step.
    """

    def __init__(self, count: int, batch: int) -> None:
        self._count = count
        self._batch = batch
        self._order: tuple[tuple[int, int], torch.Tensor] | None = None

    def chosen(self, seed: int, step: int, ranks: int) -> torch.Tensor:
        """Numbers of examples, a row for each rank."""
        together = ranks * self._batch
        epoch, within = divmod(step, max(self._count // together, 1))
        if self._order is None or self._order[0] != (seed, epoch):
            self._order = (seed, epoch), torch.randperm(self._count, generator=generator_of(seed, epoch, 0))
        places = (within * together + torch.arange(together)) % self._count
        return self._order[1][places].view(ranks, self._batch)


def generator_of(seed: int, step: int, rank: int) -> torch.Generator:
    """Random numbers of one rank's step, drawn on the CPU: the same on every machine."""
    # Hashed, as torch reads no more than 32 bits of a seed: the three numbers do not fit into them.
    digest = hashlib.blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=4).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest))


class _Language:
    language = True
    clip: float | None = 1.0

    def __init__(self, corpus: Corpus, size: LlamaSize, ranks: int, batch: int, lr: float, context: int) -> None:
        self._corpus, self._size = corpus, size
        self._ranks, self._batch, self._lr, self._context = ranks, batch, lr, context

    def model(self, seed: int) -> nn.Module:
        return seeded(seed, lambda: Llama(self._size))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return adamw(model.parameters(), self._lr)

    def batch(self, seed: int, step: int, rank: int) -> Batch:
        return self._windows(self._corpus.training, self._batch, generator_of(seed, step, rank))

    def validation(self, rank: int) -> Iterator[Batch]:
        inputs, targets = self._windows(self._corpus.validation, _VALIDATION_SEQUENCES, generator_of(0, 0, 0))
        return _parts(inputs, targets, rank, self._ranks)

    def to_json(self) -> dict[str, object]:
        return self._corpus.to_json()

    def _windows(self, text: torch.Tensor, count: int, generator: torch.Generator) -> Batch:
        length = self._context + 1
        first = torch.randint(len(text) - length + 1, (count, 1), generator=generator)
        windows = text[first + torch.arange(length)].long()
        return Batch(windows[:, :-1], windows[:, 1:])


class _Pictures:
    language = False
    clip: float | None = None

    def __init__(self, images: Images, ranks: int, batch: int, lr: float) -> None:
        self._images = images
        self._ranks, self._lr = ranks, lr
        self._epochs = Epochs(len(images.training), batch)

    def model(self, seed: int) -> nn.Module:
        return seeded(seed, lambda: ResNet(self._images.training.shape[1], CLASSES))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self._lr, momentum=0.9, weight_decay=5e-4)

    def batch(self, seed: int, step: int, rank: int) -> Batch:
        chosen = self._epochs.chosen(seed, step, self._ranks)[rank]
        return Batch(self._images.training[chosen], self._images.training_labels[chosen])

    def validation(self, rank: int) -> Iterator[Batch]:
        return _parts(self._images.validation, self._images.validation_labels, rank, self._ranks)

    def to_json(self) -> dict[str, object]:
        return self._images.to_json()


def _parts(inputs: torch.Tensor, targets: torch.Tensor, rank: int, world: int) -> Iterator[Batch]:
    own, wanted = inputs[rank::world], targets[rank::world]
    for first in range(0, len(own), _VALIDATION_BATCH):
        yield Batch(own[first : first + _VALIDATION_BATCH], wanted[first : first + _VALIDATION_BATCH])

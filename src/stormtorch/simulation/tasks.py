"""What virtual workers learn: models, and batches of all workers at once, stacked and on the device.

Letters at the end of names: W workers, B examples of a batch, T tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import nn
from torch.nn import functional

from stormtorch.bench.settings import BadSetting, check_between, check_subset
from stormtorch.training.atis import PADDING, Utterances, open_atis
from stormtorch.training.cifar10 import open_cifar10
from stormtorch.training.corpus import open_corpus
from stormtorch.training.images import CLASSES, open_images
from stormtorch.training.llama import Llama, LlamaSize
from stormtorch.training.lstm import LstmTagger
from stormtorch.training.resnet import ResNet
from stormtorch.training.tasks import Batch, generator_of, loss_of, rate_at
from stormtorch.training.tokens import open_stories

TASKS = ("llama", "stories15m", "resnet20", "resnet110", "lstm")
"""What can be learned."""

_HELD_OUT = 256
# Scores of one part of what is held out, so that a vocabulary of 32,000 fits into any memory: 128 MB, or 1 GB.
_SCORES_CPU = 1 << 25
_SCORES_GPU = 1 << 28
# Pixels on each side of a picture before it is cut to its size again, elsewhere.
_MARGIN = 4
_JUDGED_IMAGES = 1000


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


def open_task(
    name: str,
    data: Path | None = None,
    *,
    batch: int | None = None,
    device: torch.device | None = None,
    lr: float | None = None,
    context: int | None = None,
    width: int | None = None,
    layers: int | None = None,
    held_out: int | None = None,
) -> Task:
    """The task of that name; reads its data.

    Args:
        name: One of `TASKS`.
        data: llama: a text, or WikiText-2's folder; None is Python's standard library. stories15m: a folder or a file,
            see `open_stories`. resnet20, resnet110: see `open_cifar10`; None are scikit-learn's digits. lstm: ATIS's
            folder.
        batch: Examples of each worker in a step; None is 8 of llama and lstm, 2 of stories15m, 32 of pictures.
        device: Where batches are; None is the CPU.
        lr: The highest learning rate; None is what the task learns well with.
        context: Tokens of an example; None is 64 of llama, 128 of stories15m.
        width: Of llama; None is 64.
        layers: Of llama; None is 2.
        held_out: Examples to be judged by, the same for all; None is 256 of language models, and all of the others.

    Raises:
        BadSetting: A value makes no sense for this task (`model` is the name's), or the data cannot be read (`data`).
    """
    check_subset("model", (name,), TASKS)
    _check(name, "context", context, 2, 4096, of=("llama", "stories15m"))
    _check(name, "width", width, 16, 8192, of=("llama",))
    _check(name, "layers", layers, 1, 100, of=("llama",))
    _check(name, "lr", lr, 1e-9, 100)
    _check(name, "batch", batch, 1, 65536)
    _check(name, "held_out", held_out, 1, 1_000_000)
    device = device or torch.device("cpu")
    if name == "llama":
        return _Text(
            data, device, batch or 8, lr or 1e-3, context or 64, held_out or _HELD_OUT, width or 64, layers or 2
        )
    if name == "stories15m":
        return _Stories(_named(data, name), device, batch or 2, lr or 3e-4, context or 128, held_out or _HELD_OUT)
    if name == "lstm":
        return _Slots(_named(data, name), device, batch or 8, lr or 5e-3, held_out)
    return _Pictures(name, data, device, batch or 32, lr or 0.1, held_out)


def _check(name: str, knob: str, value: float | None, low: float, high: float, *, of: tuple[str, ...] = TASKS) -> None:
    """None, the task's own choice, is always right."""
    if value is not None and name not in of:
        raise BadSetting(knob, f"belongs to {' and '.join(of)}, not to {name}")
    if value is not None:
        check_between(knob, value, low, high)


def _named(data: Path | None, name: str) -> Path:
    if data is None:
        raise BadSetting("data", f"must name what {name} learns from: it comes with no library")
    return data


class _Learned(ABC):
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
        return loss_of(model(batch.inputs), batch.targets)

    def optimizer(self, parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=self.lr, betas=(0.9, 0.95), weight_decay=0.1)

    def rate(self, step: int, steps: int) -> float:
        return rate_at(step, steps, self.lr)

    def evaluate(self, model: nn.Module) -> tuple[float, float]:
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
        return {"model": self.name, "batch": self._batch, "lr": self.lr, **self._facts}

    @abstractmethod
    def _held_out(self) -> Iterator[Batch]:
        """What the model is judged by, in parts."""


# --- language models --------------------------------------------------------------------------------------------------


class _Language(_Learned):
    """Windows of a text that lies on the device."""

    language = True

    def __init__(
        self, name: str, device: torch.device, batch: int, lr: float, context: int, held_out: int, vocabulary: int
    ) -> None:
        super().__init__(name, device, batch, lr)
        self._context = context
        self._judged = held_out
        self._vocabulary = vocabulary

    def _take(self, training: torch.Tensor, validation: torch.Tensor, facts: dict[str, object]) -> None:
        if min(len(training), len(validation)) <= self._context:
            raise BadSetting("context", f"must be shorter than the text, got {self._context}")
        self._training, self._validation = training.to(self.device), validation.to(self.device)
        self._facts = {"context": self._context, "held_out": self._judged, "data": facts}

    def batches(self, seed: int, step: int, workers: int, first: int, last: int) -> Batch:
        starts_WB = self._starts(self._training, (workers, self._batch), generator_of(seed, step, 0))
        return self._windows(self._training, starts_WB[first:last])

    def _held_out(self) -> Iterator[Batch]:
        starts = self._starts(self._validation, (self._judged,), generator_of(0, 0, 0))
        scores = _SCORES_CPU if self.device.type == "cpu" else _SCORES_GPU
        for part in torch.split(starts, max(scores // (self._context * self._vocabulary), 1)):
            yield self._windows(self._validation, part)

    def _starts(self, text: torch.Tensor, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        return torch.randint(len(text) - self._context, shape, generator=generator)

    def _windows(self, text: torch.Tensor, starts: torch.Tensor) -> Batch:
        within = torch.arange(self._context + 1, device=self.device)
        windows = text[starts.to(self.device).unsqueeze(-1) + within].long()
        return Batch(windows[..., :-1], windows[..., 1:])


class _Text(_Language):
    """Bytes, by a model that begins with random weights."""

    def __init__(
        self,
        data: Path | None,
        device: torch.device,
        batch: int,
        lr: float,
        context: int,
        held_out: int,
        width: int,
        layers: int,
    ) -> None:
        if width % 16:
            raise BadSetting("width", f"must be a multiple of 16, got {width}")
        self._size = LlamaSize(layers=layers, width=width, heads=max(width // 32, 1))
        super().__init__("llama", device, batch, lr, context, held_out, self._size.vocabulary)
        corpus = _data(open_corpus, data)
        self._take(corpus.training, corpus.validation, corpus.to_json())
        self._facts |= {"width": width, "layers": layers}

    def model(self, seed: int) -> nn.Module:
        return _seeded(seed, lambda: Llama(self._size))


class _Stories(_Language):
    """Tokens of WikiText-2, by a model that has learned stories: every seed begins with its weights."""

    def __init__(self, data: Path, device: torch.device, batch: int, lr: float, context: int, held_out: int) -> None:
        self._stories = open_stories(data)
        super().__init__("stories15m", device, batch, lr, context, held_out, self._stories.size.vocabulary)
        self._take(self._stories.training, self._stories.validation, self._stories.to_json())

    def model(self, seed: int) -> nn.Module:
        model = _seeded(seed, lambda: Llama(self._stories.size))
        model.load_state_dict(self._stories.state)
        return model


# --- pictures ---------------------------------------------------------------------------------------------------------


class _Pictures(_Learned):
    """CIFAR-10, each picture shifted and mirrored at random; or digits, as they are."""

    clip: float | None = None

    def __init__(
        self, name: str, data: Path | None, device: torch.device, batch: int, lr: float, held_out: int | None
    ) -> None:
        super().__init__(name, device, batch, lr)
        found = _data(open_images, None) if data is None else open_cifar10(data)
        # A digit that is mirrored is another one, or none.
        self._changed = data is not None
        self._training, self._labels = found.training.to(device), found.training_labels.to(device)
        self._validation, self._validation_labels = (
            part[:held_out].to(device) for part in (found.validation, found.validation_labels)
        )
        # Bytes stay bytes until a batch needs them: as float32, CIFAR-10 has 600 MB.
        if found.training.dtype == torch.uint8:
            sample = found.training[:: max(len(found.training) // 10_000, 1)].float()
            mean, deviation = sample.mean((0, 2, 3)), sample.std((0, 2, 3)).clamp(min=1e-6)
        else:
            mean, deviation = torch.zeros(found.training.shape[1]), torch.ones(found.training.shape[1])
        self._mean, self._deviation = (each.view(-1, 1, 1).to(device) for each in (mean, deviation))
        self._epochs = _Epochs(len(found.training), batch)
        self._facts = {
            "held_out": len(self._validation),
            "data": found.to_json(),
            "shifted_and_mirrored": self._changed,
        }

    def model(self, seed: int) -> nn.Module:
        blocks = 18 if self.name == "resnet110" else 3
        return _seeded(seed, lambda: ResNet(self._training.shape[1], CLASSES, blocks=blocks))

    def optimizer(self, parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self.lr, momentum=0.9, weight_decay=1e-4)

    def rate(self, step: int, steps: int) -> float:
        """Up in the first twentieth; a tenth from one half on, a hundredth from three quarters on."""
        warmup = max(steps // 20, 1)
        if step < warmup:
            return self.lr * (step + 1) / warmup
        return self.lr * (1.0 if 2 * step < steps else 0.1 if 4 * step < 3 * steps else 0.01)

    def batches(self, seed: int, step: int, workers: int, first: int, last: int) -> Batch:
        chosen_WB = self._epochs.chosen(seed, step, workers)
        generator = generator_of(seed, step, 1)
        moves = torch.randint(2 * _MARGIN + 1, (2, workers, self._batch), generator=generator)
        mirrored = torch.randint(2, (workers, self._batch), generator=generator)
        chosen = chosen_WB[first:last].flatten().to(self.device)
        pictures = self._normalized(self._training[chosen])
        if self._changed:
            down, right = moves[:, first:last].flatten(1).to(self.device)
            pictures = _moved(pictures, down, right, mirrored[first:last].flatten().to(self.device))
        shape = last - first, self._batch
        return Batch(pictures.view(*shape, *pictures.shape[1:]), self._labels[chosen].view(shape))

    def _held_out(self) -> Iterator[Batch]:
        for first in range(0, len(self._validation), _JUDGED_IMAGES):
            part = slice(first, first + _JUDGED_IMAGES)
            yield Batch(self._normalized(self._validation[part]), self._validation_labels[part])

    def _normalized(self, pictures: torch.Tensor) -> torch.Tensor:
        return (pictures.float() - self._mean) / self._deviation


def _moved(pictures: torch.Tensor, down: torch.Tensor, right: torch.Tensor, mirrored: torch.Tensor) -> torch.Tensor:
    """Each picture cut out of itself with a margin of zeros, at a place of its own, and mirrored where told."""
    count, channels, height, width = pictures.shape
    padded = functional.pad(pictures, (_MARGIN,) * 4)
    along = torch.arange(width, device=pictures.device).expand(count, width)
    columns = right.unsqueeze(1) + torch.where(mirrored.bool().unsqueeze(1), width - 1 - along, along)
    rows = down.unsqueeze(1) + torch.arange(height, device=pictures.device)
    which = torch.arange(count, device=pictures.device).view(-1, 1, 1, 1)
    channel = torch.arange(channels, device=pictures.device).view(1, -1, 1, 1)
    return padded[which, channel, rows.view(count, 1, height, 1), columns.view(count, 1, 1, width)]


# --- sentences --------------------------------------------------------------------------------------------------------


class _Slots(_Learned):
    """ATIS: the slot of each word."""

    def __init__(self, data: Path, device: torch.device, batch: int, lr: float, held_out: int | None) -> None:
        super().__init__("lstm", device, batch, lr)
        self._atis = open_atis(data)
        self._judged = min(held_out or len(self._atis.validation.words), len(self._atis.validation.words))
        self._training, self._validation = (_on(device, part) for part in (self._atis.training, self._atis.validation))
        self._lengths = self._atis.training.lengths
        self._epochs = _Epochs(len(self._lengths), batch)
        self._facts = {"held_out": self._judged, "data": self._atis.to_json()}

    def model(self, seed: int) -> nn.Module:
        return _seeded(seed, lambda: LstmTagger(self._atis.words, self._atis.slots))

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        scores, targets = model(batch.inputs).flatten(0, -2), batch.targets.flatten()
        asked = (targets != PADDING).to(scores.dtype)
        losses = functional.cross_entropy(scores, targets.clamp(min=0), reduction="none")
        return (losses * asked).sum() / asked.sum()

    def optimizer(self, parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=self.lr)

    def batches(self, seed: int, step: int, workers: int, first: int, last: int) -> Batch:
        chosen_WB = self._epochs.chosen(seed, step, workers)
        # As long as the longest of all workers, not only of these: padding then changes with nothing but the step.
        longest = int(self._lengths[chosen_WB].max())
        chosen = chosen_WB[first:last].to(self.device)
        return Batch(self._training.words[chosen, :longest], self._training.slots[chosen, :longest])

    def _held_out(self) -> Iterator[Batch]:
        yield Batch(self._validation.words[: self._judged], self._validation.slots[: self._judged])


# --- what several of them need ----------------------------------------------------------------------------------------


class _Epochs:
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


_Opened = TypeVar("_Opened")


def _data(read: Callable[[Path | None], _Opened], data: Path | None) -> _Opened:
    """What is read, whose errors name the knob that is turned here."""
    try:
        return read(data)
    except BadSetting as error:
        raise BadSetting("data", error.problem) from error


def _seeded(seed: int, make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        return make()


def _on(device: torch.device, part: Utterances) -> Utterances:
    return Utterances(part.words.to(device), part.slots.to(device), part.lengths)

"""Language models: windows of a text that lies on the device, as bytes or as tokens."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from stormtorch.checks import BadSetting, blaming
from stormtorch.tasks.batches import Batch, generator_of, seeded
from stormtorch.tasks.data.corpus import open_corpus
from stormtorch.tasks.data.tokens import open_stories
from stormtorch.tasks.models.llama import Llama, LlamaSize
from stormtorch.tasks.task import Learned

HELD_OUT = 256
"""Examples to be judged by, where nobody asks for more or fewer."""
# Scores of one part of what is held out, so that a vocabulary of 32,000 fits into any memory: 128 MB, or 1 GB.
_SCORES_CPU = 1 << 25
_SCORES_GPU = 1 << 28


class Language(Learned):
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
        """Windows that begin anywhere."""
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


class Text(Language):
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
        with blaming("data"):
            corpus = open_corpus(data)
        self._take(corpus.training, corpus.validation, corpus.to_json())
        self._facts |= {"width": width, "layers": layers}

    def model(self, seed: int) -> nn.Module:
        """Random weights."""
        return seeded(seed, lambda: Llama(self._size))


class Stories15m(Language):
    """Tokens of WikiText-2, by a model that has learned stories: every seed begins with its weights."""

    def __init__(self, data: Path, device: torch.device, batch: int, lr: float, context: int, held_out: int) -> None:
        self._stories = open_stories(data)
        super().__init__("stories15m", device, batch, lr, context, held_out, self._stories.size.vocabulary)
        self._take(self._stories.training, self._stories.validation, self._stories.to_json())

    def model(self, seed: int) -> nn.Module:
        """The checkpoint's weights, whatever the seed."""
        model = seeded(seed, lambda: Llama(self._stories.size))
        model.load_state_dict(self._stories.state)
        return model

"""Language models that learn windows of a text, given as bytes or as tokens."""

from collections.abc import Iterator

import torch
from torch import nn

from stormtorch.checks import BadSetting
from stormtorch_lab.tasks.data.batches import Batch, generator_of
from stormtorch_lab.tasks.data.corpus import Corpus
from stormtorch_lab.tasks.data.split import Split
from stormtorch_lab.tasks.data.tokens import Stories
from stormtorch_lab.tasks.models.llama import Llama, LlamaSize
from stormtorch_lab.tasks.task import CPU, Task, seeded

HELD_OUT = 256
"""Held-out windows to judge by, unless a caller asks for another number."""
# Scores that one batch of held-out windows may have, so that a vocabulary of 32,000 fits into memory: 128 MB, or 1 GB.
_SCORES_CPU = 1 << 25
_SCORES_GPU = 1 << 28


class Language(Task):
    """Windows of a text that lies on the device.

    Args:
        name: Name of the model.
        text: Tokens to learn from, and tokens held out.
        vocabulary: Number of different tokens.
        batch: Windows of each worker in a step.
        lr: Highest learning rate.
        context: Tokens of a window.
        held_out: Windows to judge by.
        own_generators: Whether each worker draws from a generator of its own, so that a process need not draw for the
            others; otherwise all draw from one, which is quicker for thousands of workers.
        device: Device that holds the text.
    """

    language = True

    def __init__(
        self,
        name: str,
        text: Split[torch.Tensor],
        vocabulary: int,
        *,
        batch: int,
        lr: float,
        context: int,
        held_out: int = HELD_OUT,
        own_generators: bool = False,
        device: torch.device = CPU,
    ) -> None:
        super().__init__(name, batch=batch, lr=lr, device=device)
        if min(len(text.training), len(text.validation)) <= context:
            raise BadSetting("context", f"must be shorter than the text, got {context}")
        self._training, self._validation = text.training.to(device), text.validation.to(device)
        self._vocabulary = vocabulary
        self._context = context
        self._windows_held_out = held_out
        self._own_generators = own_generators
        self._data = text.to_json()

    def batches(self, seed: int, step: int, workers: int, first: int, last: int) -> Batch:
        """Stack windows that begin anywhere in the text."""
        if self._own_generators:
            starts_WB = torch.stack(
                [
                    self._starts(self._training, (self._batch,), generator_of(seed, step, worker))
                    for worker in range(first, last)
                ]
            )
        else:
            starts_WB = self._starts(self._training, (workers, self._batch), generator_of(seed, step, 0))[first:last]
        return self._windows(self._training, starts_WB)

    def held_out(self, part: int = 0, parts: int = 1) -> Iterator[Batch]:
        """Windows of the held-out text, the same for every seed."""
        starts = self._starts(self._validation, (self._windows_held_out,), generator_of(0, 0, 0))[part::parts]
        scores = _SCORES_CPU if self.device.type == "cpu" else _SCORES_GPU
        size = max(scores // (self._context * self._vocabulary), 1)
        for first in range(0, len(starts), size):
            yield self._windows(self._validation, starts[first : first + size])

    def to_json(self) -> dict[str, object]:
        """Describe the task and its text."""
        return super().to_json() | {"context": self._context, "held_out": self._windows_held_out, "data": self._data}

    def _starts(self, text: torch.Tensor, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        return torch.randint(len(text) - self._context, shape, generator=generator)

    def _windows(self, text: torch.Tensor, starts: torch.Tensor) -> Batch:
        within = torch.arange(self._context + 1, device=self.device)
        windows = text[starts.to(self.device).unsqueeze(-1) + within].long()
        return Batch(windows[..., :-1], windows[..., 1:])


class Text(Language):
    """Bytes of a text, learned by a LLaMA that begins with random weights.

    Args:
        corpus: Bytes to learn from.
        width: Width of the model, a multiple of 16.
        layers: Layers of the model.
        batch: Windows of each worker in a step.
        lr: Highest learning rate.
        context: Bytes of a window.
        held_out: Windows to judge by.
        own_generators: See `Language`.
        device: Device that holds the text.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        width: int,
        layers: int,
        batch: int,
        lr: float,
        context: int,
        held_out: int = HELD_OUT,
        own_generators: bool = False,
        device: torch.device = CPU,
    ) -> None:
        if width % 16:
            raise BadSetting("width", f"must be a multiple of 16, got {width}")
        self._size = LlamaSize(layers=layers, width=width, heads=max(width // 32, 1))
        super().__init__(
            "llama",
            corpus,
            self._size.vocabulary,
            batch=batch,
            lr=lr,
            context=context,
            held_out=held_out,
            own_generators=own_generators,
            device=device,
        )

    def model(self, seed: int) -> nn.Module:
        """Make a LLaMA with random weights."""
        return seeded(seed, lambda: Llama(self._size))

    def to_json(self) -> dict[str, object]:
        """Describe the task, its text and the size of its model."""
        return super().to_json() | {"width": self._size.width, "layers": self._size.layers}


class Stories15m(Language):
    """Tokens of WikiText-2, learned by a LLaMA that has learned stories before.

    Args:
        stories: The checkpoint, and the text in its tokens.
        batch: Windows of each worker in a step.
        lr: Highest learning rate.
        context: Tokens of a window.
        held_out: Windows to judge by.
        device: Device that holds the text.
    """

    def __init__(
        self,
        stories: Stories,
        *,
        batch: int,
        lr: float,
        context: int,
        held_out: int = HELD_OUT,
        device: torch.device = CPU,
    ) -> None:
        self._stories = stories
        super().__init__(
            "stories15m",
            stories,
            stories.size.vocabulary,
            batch=batch,
            lr=lr,
            context=context,
            held_out=held_out,
            device=device,
        )

    def model(self, seed: int) -> nn.Module:
        """Make a LLaMA with the weights of the checkpoint, whatever the seed."""
        model = seeded(seed, lambda: Llama(self._stories.size))
        model.load_state_dict(self._stories.state)
        return model

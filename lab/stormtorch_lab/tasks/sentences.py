"""Sentences whose words have slots, padded to the longest."""

from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.nn import functional

from stormtorch_lab.tasks.data.atis import Atis
from stormtorch_lab.tasks.data.batches import PADDING, Batch, Epochs
from stormtorch_lab.tasks.models.lstm import LstmTagger
from stormtorch_lab.tasks.task import CPU, Task, seeded


class Slots(Task):
    """Slots of the words of a sentence, learned by an LSTM.

    Args:
        atis: Sentences to learn from.
        batch: Sentences of each worker in a step.
        lr: Highest learning rate.
        held_out: Sentences to judge by; None takes all that are held out.
        device: Device that holds the sentences.
    """

    def __init__(
        self, atis: Atis, *, batch: int, lr: float, held_out: int | None = None, device: torch.device = CPU
    ) -> None:
        super().__init__("lstm", batch=batch, lr=lr, device=device)
        self._atis = atis
        self._training, self._validation = atis.training.to(device), atis.validation[:held_out].to(device)
        # On the CPU: the length of a batch is read there in every step.
        self._lengths = (atis.training.targets != PADDING).sum(1)
        self._epochs = Epochs(len(self._lengths), batch)

    def model(self, seed: int) -> nn.Module:
        """Make an LSTM with random weights."""
        return seeded(seed, lambda: LstmTagger(self._atis.words, self._atis.slots))

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Mean over the words: the padding behind a sentence does not count."""
        scores, targets = model(batch.inputs).flatten(0, -2), batch.targets.flatten()
        asked = (targets != PADDING).to(scores.dtype)
        losses = functional.cross_entropy(scores, targets.clamp(min=0), reduction="none")
        return (losses * asked).sum() / asked.sum()

    def optimizer(self, parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        """Make Adam."""
        return torch.optim.Adam(parameters, lr=self.lr)

    def batches(self, seed: int, step: int, workers: int, first: int, last: int) -> Batch:
        """Stack sentences: each once in an epoch."""
        chosen_WB = self._epochs.chosen(seed, step, workers)
        # Padded to the longest sentence of all workers, not only of these: padding then depends on the step alone.
        longest = int(self._lengths[chosen_WB].max())
        chosen = chosen_WB[first:last].to(self.device)
        return Batch(self._training.inputs[chosen, :longest], self._training.targets[chosen, :longest])

    def held_out(self, part: int = 0, parts: int = 1) -> Iterator[Batch]:
        """Held-out sentences in one batch, as long as the longest of all."""
        own = self._validation[part::parts]
        if len(own):
            yield Batch(own.inputs, own.targets)

    def to_json(self) -> dict[str, object]:
        """Describe the task and its sentences."""
        return super().to_json() | {"held_out": len(self._validation), "data": self._atis.to_json()}

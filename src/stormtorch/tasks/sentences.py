"""Sentences whose words have slots, padded to the longest."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from stormtorch.tasks.batches import Batch, Epochs, seeded
from stormtorch.tasks.data.atis import PADDING, Utterances, open_atis
from stormtorch.tasks.models.lstm import LstmTagger
from stormtorch.tasks.task import Learned


class Slots(Learned):
    """ATIS: the slot of each word."""

    def __init__(self, data: Path, device: torch.device, batch: int, lr: float, held_out: int | None) -> None:
        super().__init__("lstm", device, batch, lr)
        self._atis = open_atis(data)
        self._judged = min(held_out or len(self._atis.validation.words), len(self._atis.validation.words))
        self._training, self._validation = (_on(device, part) for part in (self._atis.training, self._atis.validation))
        self._lengths = self._atis.training.lengths
        self._epochs = Epochs(len(self._lengths), batch)
        self._facts = {"held_out": self._judged, "data": self._atis.to_json()}

    def model(self, seed: int) -> nn.Module:
        """Random weights."""
        return seeded(seed, lambda: LstmTagger(self._atis.words, self._atis.slots))

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Mean over the words: what is behind a sentence does not count."""
        scores, targets = model(batch.inputs).flatten(0, -2), batch.targets.flatten()
        asked = (targets != PADDING).to(scores.dtype)
        losses = functional.cross_entropy(scores, targets.clamp(min=0), reduction="none")
        return (losses * asked).sum() / asked.sum()

    def optimizer(self, parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(parameters, lr=self.lr)

    def batches(self, seed: int, step: int, workers: int, first: int, last: int) -> Batch:
        """Each sentence once in an epoch."""
        chosen_WB = self._epochs.chosen(seed, step, workers)
        # As long as the longest of all workers, not only of these: padding then changes with nothing but the step.
        longest = int(self._lengths[chosen_WB].max())
        chosen = chosen_WB[first:last].to(self.device)
        return Batch(self._training.words[chosen, :longest], self._training.slots[chosen, :longest])

    def _held_out(self) -> Iterator[Batch]:
        yield Batch(self._validation.words[: self._judged], self._validation.slots[: self._judged])


def _on(device: torch.device, part: Utterances) -> Utterances:
    return Utterances(part.words.to(device), part.slots.to(device), part.lengths)

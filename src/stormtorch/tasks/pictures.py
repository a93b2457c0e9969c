"""Pictures to tell apart, normalized, shifted and mirrored on the device."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from stormtorch.checks import blaming
from stormtorch.tasks.batches import Batch, Epochs, generator_of, seeded
from stormtorch.tasks.data.cifar10 import open_cifar10
from stormtorch.tasks.data.images import CLASSES, open_images
from stormtorch.tasks.models.resnet import ResNet
from stormtorch.tasks.task import Learned

# Pixels on each side of a picture before it is cut to its size again, elsewhere.
_MARGIN = 4
_JUDGED_IMAGES = 1000


class Pictures(Learned):
    """CIFAR-10, each picture shifted and mirrored at random; or digits, as they are."""

    clip: float | None = None

    def __init__(
        self, name: str, data: Path | None, device: torch.device, batch: int, lr: float, held_out: int | None
    ) -> None:
        super().__init__(name, device, batch, lr)
        with blaming("data"):
            found = open_images() if data is None else open_cifar10(data)
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
        self._epochs = Epochs(len(found.training), batch)
        self._facts = {
            "held_out": len(self._validation),
            "data": found.to_json(),
            "shifted_and_mirrored": self._changed,
        }

    def model(self, seed: int) -> nn.Module:
        """ResNet-20 or ResNet-110."""
        deep = self.name == "resnet110"
        return seeded(seed, lambda: ResNet(self._training.shape[1], CLASSES, blocks=18 if deep else 3, silent=deep))

    def optimizer(self, parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(parameters, lr=self.lr, momentum=0.9, weight_decay=1e-4)

    def rate(self, step: int, steps: int) -> float:
        """Up in the first twentieth; a tenth from one half on, a hundredth from three quarters on."""
        warmup = max(steps // 20, 1)
        if step < warmup:
            return self.lr * (step + 1) / warmup
        return self.lr * (1.0 if 2 * step < steps else 0.1 if 4 * step < 3 * steps else 0.01)

    def batches(self, seed: int, step: int, workers: int, first: int, last: int) -> Batch:
        """Each picture once in an epoch, moved anew each time."""
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

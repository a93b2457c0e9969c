"""Image recognition: images are normalized, shifted and mirrored on the device."""

from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.nn import functional

from stormtorch_lab.tasks.data.batches import Batch, Epochs, generator_of
from stormtorch_lab.tasks.data.images import CLASSES, Images
from stormtorch_lab.tasks.models.resnet import ResNet
from stormtorch_lab.tasks.task import CPU, Schedule, Task, seeded, staircase

# Pixels of zeros around an image, from which it is cut out again at another place.
_MARGIN = 4
_HELD_OUT_BATCH = 1000


class Pictures(Task):
    """Images to recognize, learned by a ResNet.

    Args:
        name: "resnet20" or "resnet110".
        images: Images to learn from; bytes are normalized batch by batch.
        batch: Images of each worker in a step.
        lr: Highest learning rate.
        held_out: Images to judge by; None takes all that are held out.
        moved: Whether images are shifted and mirrored at random. Digits should not be: a mirrored digit is no digit.
        weight_decay: Weight decay of SGD.
        schedule: How the learning rate changes from step to step.
        device: Device that holds the images.
    """

    clip: float | None = None

    def __init__(
        self,
        name: str,
        images: Images,
        *,
        batch: int,
        lr: float,
        held_out: int | None = None,
        moved: bool = False,
        weight_decay: float = 1e-4,
        schedule: Schedule = staircase,
        device: torch.device = CPU,
    ) -> None:
        super().__init__(name, batch=batch, lr=lr, schedule=schedule, device=device)
        self._moved = moved
        self._weight_decay = weight_decay
        self._training = images.training.to(device)
        self._validation = images.validation[:held_out].to(device)
        # Bytes stay bytes until a batch needs them: as float32, CIFAR-10 has 600 MB.
        channels = images.training.inputs.shape[1]
        if images.training.inputs.dtype == torch.uint8:
            sample = images.training.inputs[:: max(len(images.training) // 10_000, 1)].float()
            mean, deviation = sample.mean((0, 2, 3)), sample.std((0, 2, 3)).clamp(min=1e-6)
        else:
            mean, deviation = torch.zeros(channels), torch.ones(channels)
        self._mean, self._deviation = (each.view(-1, 1, 1).to(device) for each in (mean, deviation))
        self._epochs = Epochs(len(images.training), batch)
        self._data = images.to_json()

    def model(self, seed: int) -> nn.Module:
        """Make ResNet-20 or ResNet-110 with random weights."""
        deep = self.name == "resnet110"
        channels = self._training.inputs.shape[1]
        return seeded(seed, lambda: ResNet(channels, CLASSES, blocks=18 if deep else 3, silent=deep))

    def optimizer(self, parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        """Make SGD with momentum."""
        return torch.optim.SGD(parameters, lr=self.lr, momentum=0.9, weight_decay=self._weight_decay)

    def batches(self, seed: int, step: int, workers: int, first: int, last: int) -> Batch:
        """Stack images: each once in an epoch, and moved anew each time."""
        chosen = self._epochs.chosen(seed, step, workers)[first:last].flatten().to(self.device)
        images = self._normalized(self._training.inputs[chosen])
        if self._moved:
            generator = generator_of(seed, step, 1)
            shifts = torch.randint(2 * _MARGIN + 1, (2, workers, self._batch), generator=generator)
            mirrored = torch.randint(2, (workers, self._batch), generator=generator)
            down, right = shifts[:, first:last].flatten(1).to(self.device)
            images = _move(images, down, right, mirrored[first:last].flatten().to(self.device))
        shape = last - first, self._batch
        return Batch(images.view(*shape, *images.shape[1:]), self._training.targets[chosen].view(shape))

    def held_out(self, part: int = 0, parts: int = 1) -> Iterator[Batch]:
        """Held-out images, normalized and never moved."""
        own = self._validation[part::parts]
        for first in range(0, len(own), _HELD_OUT_BATCH):
            images = own[first : first + _HELD_OUT_BATCH]
            yield Batch(self._normalized(images.inputs), images.targets)

    def to_json(self) -> dict[str, object]:
        """Describe the task and its images."""
        facts = {"held_out": len(self._validation), "data": self._data, "shifted_and_mirrored": self._moved}
        return super().to_json() | facts

    def _normalized(self, images: torch.Tensor) -> torch.Tensor:
        return (images.float() - self._mean) / self._deviation


def _move(images: torch.Tensor, down: torch.Tensor, right: torch.Tensor, mirrored: torch.Tensor) -> torch.Tensor:
    """Pad each image with zeros, cut it out at an offset of its own, and mirror it where `mirrored` says so."""
    count, channels, height, width = images.shape
    padded = functional.pad(images, (_MARGIN,) * 4)
    along = torch.arange(width, device=images.device).expand(count, width)
    columns = right.unsqueeze(1) + torch.where(mirrored.bool().unsqueeze(1), width - 1 - along, along)
    rows = down.unsqueeze(1) + torch.arange(height, device=images.device)
    which = torch.arange(count, device=images.device).view(-1, 1, 1, 1)
    channel = torch.arange(channels, device=images.device).view(1, -1, 1, 1)
    return padded[which, channel, rows.view(count, 1, height, 1), columns.view(count, 1, 1, width)]

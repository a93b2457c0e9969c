"""ResNets for small images, as He et al. (2015) trained them on CIFAR-10: section 4.2, with identity shortcuts."""

import torch
from torch import nn
from torch.nn import functional

_WIDTHS = (16, 32, 64)


class ResNet(nn.Module):
    """Model that scores each class: (N, channels, height, width) become (N, classes).

    Args:
        channels: 3 for colours, 1 for grey. Images should have at least 8 x 8 pixels, as they are halved twice.
        classes: Number of classes.
        blocks: Blocks of two convolutions in each of three stages: 3 makes ResNet-20, 18 ResNet-110.
        silent: Whether every block begins as its shortcut alone (its last scale is zero; Goyal et al., 2017).
            Deep networks need this to start with a high learning rate.
    """

    def __init__(self, channels: int = 3, classes: int = 10, *, blocks: int = 3, silent: bool = False) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv2d(channels, _WIDTHS[0], 3, padding=1, bias=False), nn.BatchNorm2d(_WIDTHS[0]), nn.ReLU()
        )
        stages = []
        before = _WIDTHS[0]
        for width in _WIDTHS:
            for _ in range(blocks):
                stages.append(_Block(before, width, 1 if width == before else 2, silent))
                before = width
        self.blocks = nn.Sequential(*stages)
        self.head = nn.Linear(_WIDTHS[-1], classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Score each image; a mean over its pixels precedes the last layer."""
        scores: torch.Tensor = self.head(self.blocks(self.first(images)).mean(dim=(2, 3)))
        return scores


class _Block(nn.Module):
    def __init__(self, before: int, width: int, stride: int, silent: bool) -> None:
        super().__init__()
        last = nn.BatchNorm2d(width)
        if silent:
            nn.init.zeros_(last.weight)
        self.convolutions = nn.Sequential(
            nn.Conv2d(before, width, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            last,
        )
        self.stride = stride
        self.added_channels = width - before

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        # Option A of the paper: the shortcut has no parameters, and new channels are zeros.
        shortcut = images[:, :, :: self.stride, :: self.stride]
        if self.added_channels:
            shortcut = functional.pad(shortcut, (0, 0, 0, 0, 0, self.added_channels))
        return functional.relu(self.convolutions(images) + shortcut)

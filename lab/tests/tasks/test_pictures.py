"""Image recognition: the order of images in an epoch, and how they are moved."""

from pathlib import Path

import pytest
import torch
from torch import nn

from stormtorch_lab.tasks.data.cifar10 import open_cifar10
from stormtorch_lab.tasks.kinds import open_task
from task_files import write_cifar10

pytestmark = pytest.mark.pure


def test_every_picture_comes_once_in_an_epoch_over_all_workers(tmp_path: Path) -> None:
    task = open_task("resnet20", write_cifar10(tmp_path), batch=2)
    images = open_cifar10(tmp_path).training
    labels = torch.cat([task.batches(0, step, 5, 0, 5).targets.flatten() for step in range(4)])
    assert torch.equal(labels.bincount(minlength=10), images.targets.bincount(minlength=10))


def test_a_picture_is_cut_out_of_itself_with_a_margin_and_sometimes_mirrored(tmp_path: Path) -> None:
    folder = write_cifar10(tmp_path, images=1)
    raw = open_cifar10(folder).training.inputs.float()
    scaled = (raw - raw.mean((0, 2, 3)).view(-1, 1, 1)) / raw.std((0, 2, 3)).view(-1, 1, 1)
    padded = nn.functional.pad(scaled, (4,) * 4)
    cuts = [padded[:, :, down : down + 32, right : right + 32] for down in range(9) for right in range(9)]
    known = torch.stack([each for cut in cuts for each in (cut, cut.flip(3))])
    task = open_task("resnet20", folder, batch=5)
    kinds = set()
    for step in range(6):
        for picture in task.batches(0, step, 1, 0, 1).inputs[0]:
            nearest = (known - picture).abs().amax((2, 3, 4)).amin(1)
            assert float(nearest.min()) < 1e-4
            kinds.add(int(nearest.argmin()))
    assert len(kinds) > 15
    assert {kind % 2 for kind in kinds} == {0, 1}

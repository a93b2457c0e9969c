"""CIFAR-10 as bytes: batches, packs, and files that are neither."""

import lzma
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from stormtorch.checks import BadSetting
from stormtorch_lab.tasks.data.cifar10 import open_cifar10, pack_cifar10
from stormtorch_lab.tasks.kinds import open_task
from task_files import write_cifar10

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(("images", "parts"), [(None, 1), (None, 3), (17, 1), (17, 2)])
def test_a_pack_gives_back_every_byte(tmp_path: Path, images: int | None, parts: int) -> None:
    folder = write_cifar10(tmp_path / "plain")
    paths = pack_cifar10(folder, tmp_path / "packed" / "cifar10.pack", images=images, parts=parts)
    assert len(paths) == parts
    before, after = open_cifar10(folder), open_cifar10(paths[0] if parts == 1 else tmp_path / "packed")
    assert torch.equal(after.training.inputs, before.training.inputs[:images])
    assert torch.equal(after.training.targets, before.training.targets[:images])
    assert torch.equal(after.validation.inputs, before.validation.inputs)
    assert torch.equal(after.validation.targets, before.validation.targets)


def test_a_pack_of_smooth_pictures_is_smaller_than_they_are(tmp_path: Path) -> None:
    folder = write_cifar10(tmp_path / "plain")
    slope = np.add.outer(np.arange(32), np.arange(32)).astype(np.uint8)
    for path in folder.iterdir():
        rows = np.fromfile(path, np.uint8).reshape(-1, 3073)
        rows[:, 1:] = np.tile(slope.ravel(), 3)
        rows.tofile(path)
    (packed,) = pack_cifar10(folder, tmp_path / "cifar10.pack")
    assert packed.stat().st_size < 2000
    assert torch.equal(open_cifar10(packed).training.inputs, open_cifar10(folder).training.inputs)


def test_a_part_of_a_pack_is_not_taken_for_the_whole(tmp_path: Path) -> None:
    paths = pack_cifar10(write_cifar10(tmp_path / "plain"), tmp_path / "packed" / "cifar10.pack", parts=2)
    with pytest.raises(BadSetting, match="2 of 2"):
        open_task("resnet20", paths[1])
    paths[0].unlink()
    with pytest.raises(BadSetting, match="all parts of one pack") as caught:
        open_task("resnet20", tmp_path / "packed")
    assert caught.value.name == "data"


def test_pickled_batches_are_the_same_pictures_as_binary_ones(tmp_path: Path) -> None:
    folder = write_cifar10(tmp_path / "plain")
    (tmp_path / "pickled").mkdir()
    for path in folder.iterdir():
        rows = np.fromfile(path, np.uint8).reshape(-1, 3073)
        batch = {b"labels": rows[:, 0].tolist(), b"data": np.ascontiguousarray(rows[:, 1:])}
        (tmp_path / "pickled" / path.stem).write_bytes(pickle.dumps(batch, protocol=2))
    assert torch.equal(open_cifar10(tmp_path / "pickled").training.inputs, open_cifar10(folder).training.inputs)


@pytest.mark.parametrize("content", [b"", b"\0" * 3072, b"\x0a" + b"\0" * 3072])
def test_a_file_that_is_no_binary_batch_is_refused(tmp_path: Path, content: bytes) -> None:
    (write_cifar10(tmp_path) / "data_batch_3.bin").write_bytes(content)
    with pytest.raises(BadSetting, match="holds no batch of CIFAR-10"):
        open_cifar10(tmp_path)


def test_a_pack_that_is_damaged_is_refused(tmp_path: Path) -> None:
    (path,) = pack_cifar10(write_cifar10(tmp_path / "plain"), tmp_path / "cifar10.pack")
    content = path.read_bytes()
    for damaged in (content[:-100], content[:200] + bytes(50) + content[250:], content[:21] + lzma.compress(b"short")):
        path.write_bytes(damaged)
        with pytest.raises(BadSetting) as caught:
            open_cifar10(path)
        assert caught.value.name == "data"

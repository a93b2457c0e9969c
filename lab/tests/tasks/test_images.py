"""Digits and CIFAR-10 as normalized images, and pickles that must not be run."""

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stormtorch.checks import BadSetting
from stormtorch_lab.tasks.data.images import open_images
from task_files import write_cifar10_batches

pytestmark = pytest.mark.pure


def test_the_digits_are_ten_kinds_of_8_by_8() -> None:
    pytest.importorskip("sklearn")
    images = open_images()
    assert images.training.inputs.shape == (1500, 1, 8, 8)
    assert images.validation.inputs.shape == (297, 1, 8, 8)
    assert set(images.validation.targets.tolist()) == set(range(10))
    assert float(images.training.inputs.mean()) == pytest.approx(0.0, abs=1e-4)


def test_without_scikit_learn_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(BadSetting, match=r"stormtorch-lab\[train\]") as caught:
        open_images()
    assert caught.value.name == "cifar10"


@pytest.mark.parametrize("inner", ["", "cifar-10-batches-py"])
def test_cifar10_is_read_from_its_folder_or_the_one_around_it(tmp_path: Path, inner: str) -> None:
    write_cifar10_batches(tmp_path / inner)
    images = open_images(tmp_path)
    assert images.training.inputs.shape == (20, 3, 32, 32)
    assert images.validation.inputs.shape == (4, 3, 32, 32)
    expected = pickle.loads((tmp_path / inner / "test_batch").read_bytes())
    assert images.validation.targets.tolist() == expected[b"labels"]
    # Each channel was shifted and scaled; the order of the numbers is what it was.
    pixels = torch.from_numpy(expected[b"data"]).view(4, 3, 32, 32).float()
    judged = images.validation.inputs
    shift, scale = judged[0, 0, 0, 0], judged[0, 0, 0, 1]
    slope = (scale - shift) / (pixels[0, 0, 0, 1] - pixels[0, 0, 0, 0])
    assert torch.allclose(judged[:, 0], shift + slope * (pixels[:, 0] - pixels[0, 0, 0, 0]), atol=1e-3)


class Malicious:
    """Runs a command when a careless reader loads it."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        import os

        return os.system, (f"touch {self.target}",)


def test_a_pickle_that_asks_for_more_than_arrays_is_refused_and_not_run(tmp_path: Path) -> None:
    write_cifar10_batches(tmp_path / "data")
    hostile = pickle.dumps({b"data": Malicious(tmp_path / "ran"), b"labels": []}, protocol=2)
    (tmp_path / "data" / "data_batch_3").write_bytes(hostile)
    with pytest.raises(BadSetting, match=r"it asks for (posix|os)\.system, which no batch needs") as caught:
        open_images(tmp_path / "data")
    assert caught.value.name == "cifar10"
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a pickle",
        pickle.dumps([1, 2], protocol=2),
        pickle.dumps({b"labels": [1]}, protocol=2),
        pickle.dumps({b"data": b"bytes", b"labels": [1]}, protocol=2),
        pickle.dumps({b"data": np.zeros((1, 3072), dtype=np.float64), b"labels": [1]}, protocol=2),
        pickle.dumps({b"data": np.zeros((1, 30), dtype=np.uint8), b"labels": [1]}, protocol=2),
        pickle.dumps({b"data": np.zeros((1, 3072), dtype=np.uint8), b"labels": [10]}, protocol=2),
        pickle.dumps({b"data": np.zeros((1, 3072), dtype=np.uint8), b"labels": [1, 2]}, protocol=2),
        pickle.dumps({b"data": np.zeros((1, 3072), dtype=np.uint8), b"labels": ["one"]}, protocol=2),
    ],
)
def test_a_file_that_is_no_batch_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    write_cifar10_batches(tmp_path)
    (tmp_path / "data_batch_1").write_bytes(content)
    with pytest.raises(BadSetting, match=r"holds no batch of CIFAR-10 in .*data_batch_1") as caught:
        open_images(tmp_path)
    assert caught.value.name == "cifar10"

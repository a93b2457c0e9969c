"""What `stormtorch train` trains, and on what: models, text, pictures, and files of strangers."""

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from stormtorch.checks import BadSetting
from stormtorch.tasks.data.corpus import library_files, open_corpus
from stormtorch.tasks.data.images import open_images
from stormtorch.tasks.models.llama import Llama, LlamaSize
from stormtorch.tasks.models.lstm import LstmTagger
from stormtorch.tasks.models.resnet import ResNet
from task_files import write_cifar10_batches


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# --- models -----------------------------------------------------------------------------------------------------------


def test_the_language_model_scores_every_next_byte_and_has_the_parameters_it_should() -> None:
    model = Llama()
    assert model(torch.zeros(2, 5, dtype=torch.int64)).shape == (2, 5, 256)
    width, inner = 128, 344
    layer = 4 * width * width + 3 * width * inner + 2 * width
    assert count(model) == 4 * layer + 256 * width + width == 824_448
    assert count(Llama(LlamaSize(tied=False))) == 824_448 + 256 * width


def test_the_language_model_does_not_look_ahead_and_knows_positions() -> None:
    torch.manual_seed(0)
    model = Llama(LlamaSize(layers=2, width=32))
    tokens = torch.randint(256, (1, 12))
    changed = tokens.clone()
    changed[0, 8:] = (changed[0, 8:] + 1) % 256
    first, second = model(tokens), model(changed)
    assert torch.allclose(first[:, :8], second[:, :8], atol=1e-6)
    assert not torch.allclose(first[:, 8:], second[:, 8:], atol=1e-3)
    swapped = tokens.clone()
    swapped[0, :2] = tokens[0, :2].flip(0)
    assert not torch.allclose(model(swapped)[:, 3:], first[:, 3:], atol=1e-6)


@pytest.mark.parametrize(("name", "value"), [("layers", 0), ("width", 130), ("heads", 0), ("hidden", 0)])
def test_a_language_model_of_no_sense_is_refused_by_name(name: str, value: int) -> None:
    with pytest.raises(BadSetting) as caught:
        LlamaSize(**{name: value})  # type: ignore[arg-type]  # that is the point
    assert caught.value.name == name


@pytest.mark.parametrize(("channels", "size", "parameters"), [(3, 32, 269_722), (1, 8, 269_434)])
def test_resnet_20_has_the_parameters_of_the_paper_for_colours_and_for_digits(
    channels: int, size: int, parameters: int
) -> None:
    model = ResNet(channels)
    assert model(torch.zeros(2, channels, size, size)).shape == (2, 10)
    assert count(model) == parameters
    assert sum(isinstance(module, nn.Conv2d | nn.Linear) for module in model.modules()) == 20


def test_blocks_that_begin_silent_are_their_shortcuts_and_still_learn() -> None:
    torch.manual_seed(0)
    images = torch.randn(4, 3, 16, 16)
    deep, spoken = ResNet(blocks=4, silent=True), ResNet(blocks=4)
    before, heard = deep(images), spoken(images)
    with torch.no_grad():
        for name, parameter in (*deep.named_parameters(), *spoken.named_parameters()):
            if name.endswith("convolutions.0.weight"):
                parameter.mul_(-3.0)
    assert torch.equal(deep(images), before)
    assert not torch.equal(spoken(images), heard)
    deep(images).square().sum().backward()
    last = [each.grad for name, each in deep.named_parameters() if name.endswith("convolutions.4.weight")]
    assert len(last) == 12
    assert all(each is not None and bool(each.any()) for each in last)


def test_the_lstm_judges_each_word_by_what_came_before() -> None:
    torch.manual_seed(0)
    model = LstmTagger(20, 5, embedding=8, width=16)
    words = torch.randint(20, (3, 7))
    scores = model(words)
    assert scores.shape == (3, 7, 5)
    assert count(model) == 20 * 8 + 4 * 16 * (8 + 16 + 2) + 16 * 5 + 5
    words[:, 4] = (words[:, 4] + 1) % 20
    assert torch.equal(model(words)[:, :4], scores[:, :4])
    assert not torch.equal(model(words)[:, 4:], scores[:, 4:])


# --- data -------------------------------------------------------------------------------------------------------------


def test_the_corpus_is_the_same_every_time_and_holds_other_files_out() -> None:
    training, validation = library_files()
    assert not set(training) & set(validation)
    assert len(validation) == (len(training) + len(validation)) // 10
    assert not any(part in ("test", "tests", "site-packages") for path in training for part in path.parts[-3:])
    first, second = open_corpus(), open_corpus()
    assert first.to_json() == second.to_json()
    assert first.training.numel() > 1_000_000
    assert b"def __init__" in first.validation.numpy().tobytes()


def test_a_text_is_cut_into_what_is_learned_and_what_is_held_out(tmp_path: Path) -> None:
    content = bytes(range(250)) * 1000
    path = tmp_path / "text.bin"
    path.write_bytes(content)
    corpus = open_corpus(path)
    assert corpus.training.numpy().tobytes() + corpus.validation.numpy().tobytes() == content
    assert corpus.validation.numel() == 25_000


def test_a_text_that_is_missing_or_too_short_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"too short")
    for name, problem in (("missing", "cannot read"), ("short", "has 9")):
        with pytest.raises(BadSetting, match=problem) as caught:
            open_corpus(tmp_path / name)
        assert caught.value.name == "text"


def test_the_digits_are_ten_kinds_of_8_by_8() -> None:
    pytest.importorskip("sklearn")
    images = open_images()
    assert images.training.inputs.shape == (1500, 1, 8, 8)
    assert images.validation.inputs.shape == (297, 1, 8, 8)
    assert set(images.validation.targets.tolist()) == set(range(10))
    assert float(images.training.inputs.mean()) == pytest.approx(0.0, abs=1e-4)


def test_without_scikit_learn_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(BadSetting, match=r"stormtorch\[train\]") as caught:
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

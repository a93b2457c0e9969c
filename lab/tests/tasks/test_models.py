"""Models: shapes, numbers of parameters, and what each position sees."""

import pytest
import torch
from torch import nn

from stormtorch.checks import BadSetting
from stormtorch_lab.tasks.models.llama import Llama, LlamaSize
from stormtorch_lab.tasks.models.lstm import LstmTagger
from stormtorch_lab.tasks.models.resnet import ResNet

pytestmark = pytest.mark.pure


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


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

# mypy: disable-error-code="no-untyped-call"
# torch's own backward is untyped.
"""Without packet loss, ranks that train together give the result of one plain process."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from training import (
    Llama,
    Loss,
    MakeOptimizer,
    Recurrent,
    adamw,
    assert_close,
    assert_same,
    classes,
    images,
    next_word,
    plain,
    resnet20,
    sgd,
    trained,
    values,
    words,
)

pytestmark = pytest.mark.pure

MODELS: dict[str, Callable[[], nn.Module]] = {"llama": Llama, "resnet20": resnet20, "lstm": Recurrent}


def architecture(name: str) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[name]()


def sentences(rank: int, step: int) -> torch.Tensor:
    return words(rank, step, count=20, length=7)


DATA = {"llama": words, "resnet20": images, "lstm": sentences}
LOSS: dict[str, Loss] = {"llama": next_word, "resnet20": classes, "lstm": next_word}


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("llama", sgd),
        ("llama", adamw),
        ("lstm", sgd),
        ("lstm", adamw),
        ("resnet20", sgd),
        pytest.param("resnet20", adamw, marks=pytest.mark.slow),
    ],
)
def test_fifty_steps_of_four_ranks_are_those_of_one_process_bit_for_bit(name: str, make: MakeOptimizer) -> None:
    model = architecture(name)
    steps = 50
    theirs = plain(model, make, steps, objective=LOSS[name], data=DATA[name])
    for ours in trained(model, make, steps, objective=LOSS[name], data=DATA[name]):
        assert_same(ours, theirs)
    assert not torch.equal(theirs[0], values(model)[0])


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama", "lstm"])
def test_four_ranks_give_what_one_gives_on_all_their_data_at_once(name: str) -> None:
    model = architecture(name)
    steps = 20
    alone = copy.deepcopy(model)
    optimizer = sgd(alone)
    for step in range(steps):
        LOSS[name](alone, torch.cat([DATA[name](rank, step) for rank in range(4)])).backward()
        optimizer.step()
        optimizer.zero_grad()
    for ours in trained(model, sgd, steps, objective=LOSS[name], data=DATA[name]):
        assert_close(ours, values(alone))

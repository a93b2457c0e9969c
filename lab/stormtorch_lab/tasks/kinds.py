"""Tasks by name, with the settings that suit each of them."""

from pathlib import Path

import torch

from stormtorch.checks import BadSetting, blaming, check_between, check_subset
from stormtorch_lab.tasks.data.atis import open_atis
from stormtorch_lab.tasks.data.cifar10 import open_cifar10
from stormtorch_lab.tasks.data.corpus import open_corpus
from stormtorch_lab.tasks.data.images import open_images
from stormtorch_lab.tasks.data.tokens import open_stories
from stormtorch_lab.tasks.language import HELD_OUT, Stories15m, Text
from stormtorch_lab.tasks.pictures import Pictures
from stormtorch_lab.tasks.sentences import Slots
from stormtorch_lab.tasks.task import CPU, Task

TASKS = ("llama", "stories15m", "resnet20", "resnet110", "lstm")
"""Names of all tasks."""


def open_task(
    name: str,
    data: Path | None = None,
    *,
    batch: int | None = None,
    device: torch.device = CPU,
    lr: float | None = None,
    context: int | None = None,
    width: int | None = None,
    layers: int | None = None,
    held_out: int | None = None,
) -> Task:
    """Open a task by its name, and read its data.

    Args:
        name: One of `TASKS`.
        data: Path of the data. llama: a text, or a folder that holds WikiText-2; None is the source of Python's
            standard library. stories15m: a folder or a file, see `open_stories`. resnet20, resnet110: see
            `open_cifar10`; None is scikit-learn's digits. lstm: a folder that holds ATIS.
        batch: Examples of each worker in a step; None is 8 for llama and lstm, 2 for stories15m, 32 for images.
        device: Device that holds the data.
        lr: Highest learning rate; None is one with which the task learns well.
        context: Tokens of an example; None is 64 for llama, 128 for stories15m.
        width: Width of llama; None is 64.
        layers: Layers of llama; None is 2.
        held_out: Examples to judge by, the same for all seeds; None is 256 for language models, and all that are held
            out for the others.

    Raises:
        BadSetting: A value makes no sense for this task, or the data cannot be read. The error names the argument, and
            `model` for `name`.
    """
    check_subset("model", (name,), TASKS)
    _check(name, "context", context, 2, 4096, of=("llama", "stories15m"))
    _check(name, "width", width, 16, 8192, of=("llama",))
    _check(name, "layers", layers, 1, 100, of=("llama",))
    _check(name, "lr", lr, 1e-9, 100)
    _check(name, "batch", batch, 1, 65536)
    _check(name, "held_out", held_out, 1, 1_000_000)
    if name == "llama":
        with blaming("data"):
            corpus = open_corpus(data)
        return Text(
            corpus,
            width=width or 64,
            layers=layers or 2,
            batch=batch or 8,
            lr=lr or 1e-3,
            context=context or 64,
            held_out=held_out or HELD_OUT,
            device=device,
        )
    if name == "stories15m":
        return Stories15m(
            open_stories(_given(data, name)),
            batch=batch or 2,
            lr=lr or 3e-4,
            context=context or 128,
            held_out=held_out or HELD_OUT,
            device=device,
        )
    if name == "lstm":
        return Slots(open_atis(_given(data, name)), batch=batch or 8, lr=lr or 5e-3, held_out=held_out, device=device)
    with blaming("data"):
        images = open_images() if data is None else open_cifar10(data)
    return Pictures(
        name, images, batch=batch or 32, lr=lr or 0.1, held_out=held_out, moved=data is not None, device=device
    )


def _check(name: str, knob: str, value: float | None, low: float, high: float, *, of: tuple[str, ...] = TASKS) -> None:
    """Check a setting, unless it is None, which leaves the choice to the task."""
    if value is not None and name not in of:
        raise BadSetting(knob, f"is a setting of {' and '.join(of)}, not of {name}")
    if value is not None:
        check_between(knob, value, low, high)


def _given(data: Path | None, name: str) -> Path:
    if data is None:
        raise BadSetting("data", f"must be given for {name}: no library comes with its data")
    return data

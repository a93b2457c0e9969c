"""What virtual workers learn: models, and batches of all workers at once, stacked and on the device.

Letters at the end of names, in all of these files: W workers, B examples of a batch.
"""

from pathlib import Path

import torch

from stormtorch.checks import BadSetting, check_between, check_subset
from stormtorch.tasks.language import HELD_OUT, Stories15m, Text
from stormtorch.tasks.pictures import Pictures
from stormtorch.tasks.sentences import Slots
from stormtorch.tasks.task import Task

__all__ = ["TASKS", "Task", "open_task"]

TASKS = ("llama", "stories15m", "resnet20", "resnet110", "lstm")
"""What can be learned."""


def open_task(
    name: str,
    data: Path | None = None,
    *,
    batch: int | None = None,
    device: torch.device | None = None,
    lr: float | None = None,
    context: int | None = None,
    width: int | None = None,
    layers: int | None = None,
    held_out: int | None = None,
) -> Task:
    """The task of that name; reads its data.

    Args:
        name: One of `TASKS`.
        data: llama: a text, or WikiText-2's folder; None is Python's standard library. stories15m: a folder or a file,
            see `open_stories`. resnet20, resnet110: see `open_cifar10`; None are scikit-learn's digits. lstm: ATIS's
            folder.
        batch: Examples of each worker in a step; None is 8 of llama and lstm, 2 of stories15m, 32 of pictures.
        device: Where batches are; None is the CPU.
        lr: The highest learning rate; None is what the task learns well with.
        context: Tokens of an example; None is 64 of llama, 128 of stories15m.
        width: Of llama; None is 64.
        layers: Of llama; None is 2.
        held_out: Examples to be judged by, the same for all; None is 256 of language models, and all of the others.

    Raises:
        BadSetting: A value makes no sense for this task (`model` is the name's), or the data cannot be read (`data`).
    """
    check_subset("model", (name,), TASKS)
    _check(name, "context", context, 2, 4096, of=("llama", "stories15m"))
    _check(name, "width", width, 16, 8192, of=("llama",))
    _check(name, "layers", layers, 1, 100, of=("llama",))
    _check(name, "lr", lr, 1e-9, 100)
    _check(name, "batch", batch, 1, 65536)
    _check(name, "held_out", held_out, 1, 1_000_000)
    device = device or torch.device("cpu")
    if name == "llama":
        return Text(data, device, batch or 8, lr or 1e-3, context or 64, held_out or HELD_OUT, width or 64, layers or 2)
    if name == "stories15m":
        return Stories15m(_named(data, name), device, batch or 2, lr or 3e-4, context or 128, held_out or HELD_OUT)
    if name == "lstm":
        return Slots(_named(data, name), device, batch or 8, lr or 5e-3, held_out)
    return Pictures(name, data, device, batch or 32, lr or 0.1, held_out)


def _check(name: str, knob: str, value: float | None, low: float, high: float, *, of: tuple[str, ...] = TASKS) -> None:
    """None, the task's own choice, is always right."""
    if value is not None and name not in of:
        raise BadSetting(knob, f"belongs to {' and '.join(of)}, not to {name}")
    if value is not None:
        check_between(knob, value, low, high)


def _named(data: Path | None, name: str) -> Path:
    if data is None:
        raise BadSetting("data", f"must name what {name} learns from: it comes with no library")
    return data

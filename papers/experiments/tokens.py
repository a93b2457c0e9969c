"""What do 10 to 40 % of loss cost 64 workers that train a LLaMA of 107 M parameters, per token: plain, with the lead?

The larger model of large.py, but for its tokens: WikiText-2's own, as published, words of a vocabulary of 33,278. So
perplexities are per token, as in the publication (LLaMA-2 7B on 64 GPUs, at most +0.8 % at 10 %), and an increase is
several times that per byte. 500 steps of 128 sequences of 128 tokens read the text 3.9 times. Every run is compared
with the lossless one of its seed. A run takes about two minutes on an H200.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from grid import Run, main
from large import large
from over_seeds import above, explain, mean_and_bar, mean_text, seeds
from perplexity import COLOURS, PUBLISHED
from torch import nn

from stormtorch_lab.studies.settings import SimSettings
from stormtorch_lab.tasks.data.corpus import read_wikitext
from stormtorch_lab.tasks.data.split import Split
from stormtorch_lab.tasks.language import Language
from stormtorch_lab.tasks.models.llama import Llama, LlamaSize
from stormtorch_lab.tasks.task import Task, seeded

SEEDS = 3
# With the embedding of the words, as many parameters as large.py has: 106.8 million.
MODEL: dict[str, Any] = {"width": 704, "layers": 14, "batch": 2}
# The most telling first: policy and loss.
KINDS = (
    ("lossless", 0.0),
    ("lead", 0.1),
    ("lead", 0.4),
    ("plain", 0.1),
    ("plain", 0.4),
    ("lead", 0.2),
    ("lead", 0.3),
)
# GPUs multiply matrices quickly whose sides are multiples of this: the last words of the vocabulary never occur.
_ALIGNED = 64


class Words(Language):
    """WikiText-2 in its own tokens, learned by a LLaMA that begins with random weights; all settings must be given."""

    def __init__(self, settings: SimSettings) -> None:
        assert settings.data and settings.batch and settings.lr and settings.context and settings.held_out
        assert settings.width and settings.layers
        text, words = read_words(settings.data)
        self._size = LlamaSize(
            layers=settings.layers,
            width=settings.width,
            heads=max(settings.width // 32, 1),
            vocabulary=-(-words // _ALIGNED) * _ALIGNED,
        )
        self._words = words
        super().__init__(
            "llama",
            text,
            self._size.vocabulary,
            batch=settings.batch,
            lr=settings.lr,
            context=settings.context,
            held_out=settings.held_out,
            device=torch.device(settings.device),
        )

    def model(self, seed: int) -> nn.Module:
        """Make a LLaMA with random weights."""
        return seeded(seed, lambda: Llama(self._size))

    def to_json(self) -> dict[str, object]:
        """Describe the task, its text and the size of its model."""
        size = {"width": self._size.width, "layers": self._size.layers, "vocabulary": self._size.vocabulary}
        return super().to_json() | size | {"words": self._words}


def read_words(folder: Path) -> tuple[Split[torch.Tensor], int]:
    """Reads WikiText-2 as numbers of its words, the end of each line among them; and how many words there are."""
    parts = [read_wikitext(folder, part).decode().replace("\n", " <eos> ").split() for part in ("train", "valid")]
    numbers = {word: number for number, word in enumerate(dict.fromkeys(parts[0]))}
    training, validation = (torch.tensor([numbers[word] for word in part], dtype=torch.int32) for part in parts)
    return Split(name="WikiText-2 in words", training=training, validation=validation), len(numbers)


def words(settings: SimSettings) -> Task:
    """Reads the words, and makes what learns them."""
    return Words(settings)


def runs(chosen: argparse.Namespace) -> list[Run]:
    """All kinds of one seed, then of the next."""
    found = []
    for seed in range(SEEDS):
        for policy, loss in KINDS:
            settings = large(chosen, policies=(policy,), loss=loss, first_seed=seed, **MODEL)
            where = "" if policy == "lossless" else f"/{loss:g}"
            found.append(Run(key=f"{policy}{where}/{seed}", settings=settings, task=words))
    return found


def table(found: dict[str, dict[str, Any]]) -> list[str]:
    """Rows of the page's table: perplexity above lossless, and its error."""
    rows = []
    for policy, loss in sorted(KINDS):
        more = above(found, f"{policy}/{loss:g}", "lossless")
        if more:
            each = ", ".join(f"{one:+.2f}" for one in more)
            rows.append(f"| {policy}, {100 * loss:g} % | {mean_text(more)} % | {each} |")
    return rows


def draw(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Curves of validation, and what each loss rate costs in the end."""
    from matplotlib.figure import Figure

    print("\n".join(table(found)))
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    curves, ends = figure.subplots(1, 2)
    for policy, loss in KINDS:
        name = policy if policy == "lossless" else f"{policy}/{loss:g}"
        label = policy if policy == "lossless" else f"{policy}, {100 * loss:g} %"
        for number, run in enumerate(seeds(found, name)):
            steps, _, losses = zip(*run["val_curve"], strict=True)
            colour, shade = COLOURS.get(policy, "#343a40"), 1.0 - 1.5 * abs(loss - 0.1)
            curves.plot(steps, losses, color=colour, alpha=shade, linewidth=1, label=None if number else label)
    for policy in ("plain", "lead"):
        points = []
        for loss in sorted(loss for each, loss in KINDS if each == policy):
            more = above(found, f"{policy}/{loss:g}", "lossless")
            if more:
                points.append((100 * loss, *mean_and_bar(more)))
                ends.plot([100 * loss + 0.7] * len(more), more, ".", color=COLOURS[policy], alpha=0.6)
        if points:
            x, y, error = zip(*points, strict=True)
            ends.errorbar(x, y, error, color=COLOURS[policy], marker="o", markersize=5, capsize=4, label=policy)
    ends.plot(100 * PUBLISHED[0], PUBLISHED[1], "k*", markersize=10, label="published: LLaMA-2 7B, at most")
    ends.axhline(0, color="#adb5bd", linewidth=1, zorder=0)
    ends.set(xlabel="loss, per cent of packets", ylabel="perplexity per token above lossless, per cent")
    curves.set(xlabel="step", ylabel="loss on held-out text, nats per token")
    for axis in (curves, ends):
        axis.spines[["top", "right"]].set_visible(False)
        explain(axis, fontsize=8)
    figure.suptitle(
        "64 workers, a LLaMA of 107 M parameters, lost in both stages; bars: two standard errors, dots: seeds",
        fontsize=11,
    )
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main("tokens", __doc__, runs, draw)

"""How much perplexity does a loss rate cost 64 workers that fine-tune a real LLaMA checkpoint?

stories15M, trained on children's stories, learns WikiText-2 in 100 steps of 128 sequences, with its own tokenizer.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from grid import Run, main
from perplexity import LOSSES, REPAIRED_TO, SEEDS, TELLING, panel

from stormtorch.simulation.settings import SimSettings


def tuned(chosen: argparse.Namespace, **other: Any) -> SimSettings:
    """The checkpoint that learns another language."""
    options: dict[str, Any] = {
        "model": "stories15m",
        "data": chosen.data / "stories.pt",
        "workers": 64,
        "batch": 2,
        "steps": 100,
        "held_out": 512,
        "device": chosen.device,
    }
    if chosen.device == "cuda":
        options |= {"precision": "bfloat16"}
    return SimSettings(**(options | other))


def runs(chosen: argparse.Namespace) -> list[Run]:
    """The most telling first."""
    found = []

    def add(policy: str, loss: float, seed: int, **other: Any) -> None:
        named = "repair" if other else policy
        where = "" if policy == "lossless" else f"/{loss:g}"
        settings = tuned(chosen, policies=(policy,), loss=loss, first_seed=seed, **other)
        found.append(Run(key=f"tuned/{named}{where}/{seed}", settings=settings))

    for seed in range(SEEDS):
        add("lossless", 0.0, seed)
        add("lead", 0.1, seed)
    for seed in range(SEEDS):
        add("plain", 0.1, seed)
        add("lead", 0.4, seed)
        add("plain", 0.4, seed)
    for seed in range(SEEDS):
        for loss in LOSSES:
            if loss not in TELLING:
                add("lead", loss, seed)
                add("plain", loss, seed)
        for loss in TELLING:
            add("lead", loss, seed, budget=REPAIRED_TO)
    return found


def draw(found: dict[str, dict[str, Any]], path: Path) -> None:
    """One panel."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.4, 4.6), layout="constrained")
    axis = figure.subplots()
    panel(axis, found, "tuned")
    axis.legend(frameon=False, fontsize=8, loc="upper left")
    axis.set_title("64 workers fine-tune stories15M on WikiText-2", fontsize=11)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main("finetuning", __doc__, runs, draw)

"""How much perplexity does a loss rate cost 64 workers that fine-tune a real LLaMA checkpoint?

stories15M, trained on children's stories, learns WikiText-2 with its own tokenizer, 128 sequences a step: gently (200
steps at a learning rate of 1e-4), and hastily (100 steps at 3e-4), where updates are large.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from grid import Run, explain, main
from perplexity import LOSSES, REPAIRED_TO, SEEDS, TELLING, panel

from stormtorch.simulation.settings import SimSettings


def tuned(chosen: argparse.Namespace, **other: Any) -> SimSettings:
    """The checkpoint that learns another language."""
    options: dict[str, Any] = {
        "model": "stories15m",
        "data": chosen.data / "stories.pt",
        "workers": 64,
        "batch": 2,
        "held_out": 512,
        "device": chosen.device,
    }
    if chosen.device == "cuda":
        options |= {"precision": "bfloat16"}
    return SimSettings(**(options | other))


KINDS = {"gentle": {"steps": 200, "lr": 1e-4}, "hot": {"steps": 100, "lr": 3e-4}}


def runs(chosen: argparse.Namespace) -> list[Run]:
    """The most telling first."""
    found = []

    def add(kind: str, policy: str, loss: float, seed: int, **other: Any) -> None:
        named = "repair" if other else policy
        where = "" if policy == "lossless" else f"/{loss:g}"
        settings = tuned(chosen, policies=(policy,), loss=loss, first_seed=seed, **KINDS[kind], **other)
        found.append(Run(key=f"{kind}/{named}{where}/{seed}", settings=settings))

    for kind in KINDS:
        for seed in range(SEEDS):
            add(kind, "lossless", 0.0, seed)
            add(kind, "lead", 0.1, seed)
        for seed in range(SEEDS):
            add(kind, "plain", 0.1, seed)
            add(kind, "lead", 0.4, seed)
            add(kind, "plain", 0.4, seed)
        for seed in range(SEEDS):
            for loss in LOSSES:
                if loss not in TELLING:
                    add(kind, "lead", loss, seed)
                    add(kind, "plain", loss, seed)
            for loss in TELLING:
                add(kind, "lead", loss, seed, budget=REPAIRED_TO)
    return found


def draw(found: dict[str, dict[str, Any]], path: Path) -> None:
    """A panel for each way."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.6), layout="constrained")
    for axis, (kind, options) in zip(figure.subplots(1, 2), KINDS.items(), strict=True):
        panel(axis, found, kind)
        explain(axis, fontsize=8, loc="upper left")
        axis.set_title(f"{options['steps']} steps, learning rate {options['lr']:g}", fontsize=10)
    figure.suptitle("64 workers fine-tune stories15M on WikiText-2", fontsize=11)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main("finetuning", __doc__, runs, draw)

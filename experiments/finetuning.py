"""How much perplexity does a loss rate cost 64 workers that fine-tune a real LLaMA checkpoint?

stories15M, trained on children's stories, learns WikiText-2 with its own tokenizer. What loss costs depends on how
large updates are, so it does so at three learning rates: 3e-5 and 1e-4 (200 steps of 256 sequences), and, hastily, 3e-4
(100 steps of 128 sequences).
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
        "held_out": 512,
        "device": chosen.device,
    }
    if chosen.device == "cuda":
        options |= {"precision": "bfloat16"}
    return SimSettings(**(options | other))


KINDS: dict[str, dict[str, Any]] = {
    "slow": {"steps": 200, "lr": 3e-5, "batch": 4},
    "gentle": {"steps": 200, "lr": 1e-4, "batch": 4},
    "hot": {"steps": 100, "lr": None, "batch": 2},
}
TASKS_OWN_RATE = 3e-4


def runs(chosen: argparse.Namespace) -> list[Run]:
    """The most telling first."""
    found = []

    def add(kind: str, policy: str, loss: float, seed: int, **other: Any) -> None:
        named = "repair" if other else policy
        where = "" if policy == "lossless" else f"/{loss:g}"
        settings = tuned(chosen, policies=(policy,), loss=loss, first_seed=seed, **KINDS[kind], **other)
        found.append(Run(key=f"{kind}/{named}{where}/{seed}", settings=settings))

    for kind in ("gentle", "slow", "hot"):
        for seed in range(SEEDS):
            add(kind, "lossless", 0.0, seed)
            add(kind, "lead", 0.1, seed)
    for kind in ("gentle", "slow", "hot"):
        for seed in range(SEEDS):
            add(kind, "plain", 0.1, seed)
            add(kind, "lead", 0.4, seed)
    for kind in ("hot", "gentle", "slow"):
        for seed in range(SEEDS):
            add(kind, "lead", 0.1, seed, budget=REPAIRED_TO)
            add(kind, "plain", 0.4, seed)
            add(kind, "lead", 0.4, seed, budget=REPAIRED_TO)
            for loss in LOSSES:
                if loss not in TELLING:
                    add(kind, "lead", loss, seed)
                    add(kind, "plain", loss, seed)
    return found


def draw(found: dict[str, dict[str, Any]], path: Path) -> None:
    """A panel for each learning rate."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.5, 4.6), layout="constrained")
    for axis, (kind, options) in zip(figure.subplots(1, 3), KINDS.items(), strict=True):
        panel(axis, found, kind)
        explain(axis, fontsize=8, loc="upper left")
        axis.set_title(f"{options['steps']} steps, learning rate {options['lr'] or TASKS_OWN_RATE:g}", fontsize=10)
    figure.suptitle("64 workers fine-tune stories15M on WikiText-2", fontsize=11)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main("finetuning", __doc__, runs, draw)

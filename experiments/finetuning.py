"""How much perplexity does a loss rate cost 64 workers that fine-tune a real LLaMA checkpoint?

stories15M, trained on children's stories, learns WikiText-2 with its own tokenizer. What loss costs depends on how
large updates are and how many sequences share in them, so it does so in four ways: with a learning rate of 1e-4 by 100
steps of 1,024 sequences and by 200 of 256; slowly, 3e-5 by 200 of 256; and hastily, 3e-4 by 100 of 128.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from grid import GPU, Run, explain, main, seeds
from perplexity import LOSSES, REPAIRED_TO, SEEDS, TELLING, panel

from stormtorch.studies.settings import SimSettings


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
        options |= GPU
    return SimSettings(**(options | other))


KINDS: dict[str, dict[str, Any]] = {
    "hot": {"steps": 100, "lr": None, "batch": 2},
    "gentle": {"steps": 200, "lr": 1e-4, "batch": 4},
    "wide": {"steps": 100, "lr": 1e-4, "batch": 16},
    "slow": {"steps": 200, "lr": 3e-5, "batch": 4},
}
TASKS_OWN_RATE = 3e-4
# Seeds of each way, the most telling first.
KIND_SEEDS = {"wide": 5, "gentle": 5, "slow": SEEDS, "hot": SEEDS}


def runs(chosen: argparse.Namespace) -> list[Run]:
    """The most telling first."""
    found = []

    def add(kind: str, policy: str, loss: float, seed: int, **other: Any) -> None:
        named = "repair" if other else policy
        where = "" if policy == "lossless" else f"/{loss:g}"
        settings = tuned(chosen, policies=(policy,), loss=loss, first_seed=seed, **KINDS[kind], **other)
        found.append(Run(key=f"{kind}/{named}{where}/{seed}", settings=settings))

    for kind, count in KIND_SEEDS.items():
        for seed in range(count):
            add(kind, "lossless", 0.0, seed)
            add(kind, "lead", 0.1, seed)
    for kind, count in KIND_SEEDS.items():
        for seed in range(count):
            add(kind, "plain", 0.1, seed)
            add(kind, "lead", 0.4, seed)
    for kind, count in KIND_SEEDS.items():
        for seed in range(count):
            add(kind, "lead", 0.1, seed, budget=REPAIRED_TO, gradient_budget=1.0)
            add(kind, "plain", 0.4, seed)
            add(kind, "lead", 0.4, seed, budget=REPAIRED_TO, gradient_budget=1.0)
            for loss in LOSSES:
                if loss not in TELLING:
                    add(kind, "lead", loss, seed)
                    add(kind, "plain", loss, seed)
    return found


def draw(found: dict[str, dict[str, Any]], path: Path) -> None:
    """A panel for each way."""
    from matplotlib.figure import Figure

    kinds = {kind: options for kind, options in KINDS.items() if seeds(found, f"{kind}/lossless")}
    figure = Figure(figsize=(4.6 * max(len(kinds), 1), 4.6), layout="constrained")
    axes = figure.subplots(1, max(len(kinds), 1), squeeze=False)[0]
    for axis, (kind, options) in zip(axes, kinds.items(), strict=False):
        panel(axis, found, kind)
        explain(axis, fontsize=8, loc="upper left")
        sequences, rate = 64 * options["batch"], options["lr"] or TASKS_OWN_RATE
        axis.set_title(f"{options['steps']} steps of {sequences:,} sequences, rate {rate:.0e}", fontsize=10)
    figure.suptitle(
        "64 workers fine-tune stories15M on WikiText-2; bars: two standard errors, hollow: one seed",
        fontsize=11,
    )
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main("finetuning", __doc__, runs, draw)

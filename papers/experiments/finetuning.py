"""How much perplexity does a loss rate cost 64 workers that fine-tune a real LLaMA checkpoint?

stories15M, trained on children's stories, learns WikiText-2 with its own tokenizer. What loss costs depends on how
large updates are and how many sequences share in them, so it does so in four ways: with a learning rate of 1e-4 by 100
steps of 1,024 sequences and by 200 of 256; slowly, 3e-5 by 200 of 256; and hastily, 3e-4 by 100 of 128.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from grid import GPU, Run, main
from over_seeds import above, explain, mean_and_bar, mean_text, seeds
from perplexity import LABELS, LOSSES, REPAIRED_TO, SEEDS, TELLING, panel

from stormtorch.telemetry.statistics import mean
from stormtorch_lab.studies.settings import SimSettings


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
        options |= GPU | {"fuse": True}
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
# What removes the rest, and what it sends for that: name, label, settings.
REMEDIES: dict[str, tuple[str, dict[str, Any]]] = {
    "repair": ("lead, broadcast repaired to 1 %", {"budget": REPAIRED_TO, "gradient_budget": 1.0}),
    "both": ("lead, both stages repaired to 1 %", {"budget": REPAIRED_TO, "gradient_budget": REPAIRED_TO}),
    "parity": ("lead, parity of 0.25", {"redundancy": 0.25}),
}
# Nothing lost, and fewer sequences, by the tenth that is lost elsewhere: is that what lost gradients cost?
FEWER = 58


def runs(chosen: argparse.Namespace) -> list[Run]:
    """The most telling first."""
    found = []

    def add(kind: str, policy: str, loss: float, seed: int, remedy: str = "") -> None:
        where = "" if policy == "lossless" else f"/{loss:g}"
        other = REMEDIES[remedy][1] if remedy else {}
        settings = tuned(chosen, policies=(policy,), loss=loss, first_seed=seed, **KINDS[kind], **other)
        found.append(Run(key=f"{kind}/{remedy or policy}{where}/{seed}", settings=settings))

    for kind in ("wide", "gentle"):
        for seed in range(KIND_SEEDS[kind]):
            add(kind, "lossless", 0.0, seed)
            add(kind, "lead", 0.1, seed)
            for remedy in REMEDIES:
                add(kind, "lead", 0.1, seed, remedy)
            add(kind, "plain", 0.1, seed)
            add(kind, "lead", 0.4, seed)
        for seed in range(KIND_SEEDS[kind]):
            for loss in LOSSES:
                if loss not in TELLING:
                    add(kind, "lead", loss, seed)
            add(kind, "lead", 0.4, seed, "both")
            add(kind, "plain", 0.4, seed)
    for seed in range(KIND_SEEDS["gentle"]):
        settings = tuned(chosen, policies=("lossless",), first_seed=seed, **KINDS["gentle"], workers=FEWER)
        found.append(Run(key=f"gentle/fewer/{seed}", settings=settings))
    for kind in ("slow", "hot"):
        for seed in range(KIND_SEEDS[kind]):
            add(kind, "lossless", 0.0, seed)
            for loss in TELLING:
                add(kind, "lead", loss, seed)
                add(kind, "plain", loss, seed)
            add(kind, "lead", 0.1, seed, "repair")
    return found


def table(found: dict[str, dict[str, Any]]) -> list[str]:
    """Rows of the page's tables: each way at 10 and 40 %, then each loss, then what removes the rest at 10 %."""
    rows = []
    for kind, name in NAMES.items():
        if seeds(found, f"{kind}/lossless"):
            nats = mean([run["val_loss"] for run in seeds(found, f"{kind}/lossless")])
            cells = [mean_text(_above(found, kind, *each), "+.1f") for each in (("plain", 0.1), ("plain", 0.4))]
            cells += [mean_text(_above(found, kind, "lead", loss)) for loss in TELLING]
            count = len(seeds(found, f"{kind}/lossless"))
            rows.append(f"| {name} | {count} | {nats:.2f} | {' | '.join(cells)} |")
    rows.append("")
    for kind in ("wide", "gentle"):
        cells = [mean_text(_above(found, kind, "lead", loss)) for loss in LOSSES]
        rows.append(f"| {NAMES[kind]} | {' | '.join(cells)} |")
    rows.append("")
    for remedy, (label, _) in REMEDIES.items():
        cells = [mean_text(_above(found, kind, remedy, 0.1)) for kind in ("wide", "gentle")]
        rows.append(f"| {label} | {_bytes(found, remedy)} | {' | '.join(cells)} |")
    fewer = above(found, "gentle/fewer", "gentle/lossless")
    if fewer:
        rows.append(f"| nothing lost, {FEWER} workers instead of 64 | - | - | {mean_text(fewer)} |")
    return rows


NAMES = {
    "wide": "100 steps of 1,024 sequences, rate 1e-4",
    "gentle": "200 steps of 256 sequences, 1e-4",
    "slow": "200 steps of 256 sequences, 3e-5",
    "hot": "100 steps of 128 sequences, 3e-4",
}


def _above(found: dict[str, dict[str, Any]], kind: str, policy: str, loss: float) -> list[float]:
    return above(found, f"{kind}/{policy}/{loss:g}", f"{kind}/lossless")


def _bytes(found: dict[str, dict[str, Any]], remedy: str, loss: float = 0.1) -> str:
    """Bytes that a remedy adds to a step. Of gentle runs: older ones of the wide kind counted nothing sent again."""
    mine, base = (
        [run["bytes_sent"] for run in seeds(found, f"gentle/{name}")] for name in (f"{remedy}/{loss:g}", "lossless")
    )
    return f"{100 * (mean(mine) / mean(base) - 1):+.0f} %"


def draw(found: dict[str, dict[str, Any]], path: Path) -> None:
    """A panel for each way."""
    from matplotlib.figure import Figure

    print("\n".join(table(found)))
    figure = Figure(figsize=(10, 9), layout="constrained")
    axes = figure.subplots(2, 2)
    for axis, kind in zip(axes.flat, NAMES, strict=True):
        options = KINDS[kind]
        panel(axis, found, kind, LABELS | {"repair": REMEDIES["repair"][0]})
        for aside, (remedy, colour) in enumerate({"both": "#2f9e44", "parity": "#862e9c"}.items()):
            points = [(100 * loss + 0.9 + 0.6 * aside, _above(found, kind, remedy, loss)) for loss in LOSSES]
            shown = [(place, *mean_and_bar(more)) for place, more in points if more]
            if shown:
                x, y, error = zip(*shown, strict=True)
                label = REMEDIES[remedy][0]
                axis.errorbar(x, y, error, color=colour, marker="o", markersize=4, capsize=3, linestyle="", label=label)
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

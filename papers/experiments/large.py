"""What does 10 % of loss cost 64 workers that train a LLaMA of 106 M parameters: plain, with the lead, with parity?

The publication's own setting (LLaMA-2 7B on 64 GPUs, at most +0.8 % of perplexity at 10 %) as near as one GPU comes:
500 steps of 256 sequences of 128 bytes of WikiText-2 from scratch, in bfloat16. Every run is compared with the lossless
one of its seed. A run takes two minutes on an H200; stale replicas are described by ages, and never stored.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from grid import GPU, Run, main
from over_seeds import above, explain, mean_and_bar, mean_text, seeds
from perplexity import COLOURS, PUBLISHED

from stormtorch_lab.studies.settings import SimSettings

LOSS = 0.1
PARITY = 0.25
SEEDS = 3
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lossless": ("lossless", {}),
    "lead": ("lead", {}),
    "plain": ("plain", {}),
    "parity": ("lead", {"redundancy": PARITY}),
}
LABELS = {"plain": "plain", "lead": "lead", "parity": f"lead, parity of {PARITY:g}"}


def large(chosen: argparse.Namespace, **other: Any) -> SimSettings:
    """The large model."""
    options: dict[str, Any] = {
        "model": "llama",
        "data": chosen.data / "wikitext-2",
        "workers": 64,
        "width": 768,
        "layers": 15,
        "context": 128,
        "batch": 4,
        "lr": 5e-4,
        "held_out": 2048,
        "steps": 500,
        "device": chosen.device,
    }
    if chosen.device == "cuda":
        # Fixed, so that a GPU with other memory adds up in the same order.
        options |= GPU | {"fuse": True, "at_once": 16}
    return SimSettings(**(options | other))


def runs(chosen: argparse.Namespace) -> list[Run]:
    """All kinds of one seed, then of the next."""
    found = []
    for seed in range(SEEDS):
        for name, (policy, other) in KINDS.items():
            loss = 0.0 if policy == "lossless" else LOSS
            settings = large(chosen, policies=(policy,), loss=loss, first_seed=seed, **other)
            found.append(Run(key=f"{name}/{seed}", settings=settings))
    return found


def table(found: dict[str, dict[str, Any]]) -> list[str]:
    """Rows of the page's table: perplexity above lossless, and its error."""
    rows = []
    for name, label in LABELS.items():
        more = above(found, name, "lossless")
        each = ", ".join(f"{one:+.2f}" for one in more)
        rows.append(f"| {label} | {mean_text(more)} % | {each} |")
    return rows


def draw(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Curves of validation, and what each kind costs in the end."""
    from matplotlib.figure import Figure

    print("\n".join(table(found)))
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    curves, ends = figure.subplots(1, 2)
    colours = {"lossless": "#343a40", "plain": COLOURS["plain"], "lead": COLOURS["lead"], "parity": COLOURS["repair"]}
    for name, colour in colours.items():
        for number, run in enumerate(seeds(found, name)):
            steps, _, losses = zip(*run["val_curve"], strict=True)
            curves.plot(steps, losses, color=colour, linewidth=1, label=None if number else LABELS.get(name, name))
    for place, (name, label) in enumerate(LABELS.items()):
        more = above(found, name, "lossless")
        if more:
            average, bar = mean_and_bar(more)
            ends.errorbar(place, average, bar, color=colours[name], marker="o", markersize=5, capsize=4, label=label)
            ends.plot([place + 0.12] * len(more), more, ".", color=colours[name], alpha=0.6)
    ends.plot(len(LABELS), PUBLISHED[1], "k*", markersize=10, label="published: LLaMA-2 7B, at most")
    ends.axhline(0, color="#adb5bd", linewidth=1, zorder=0)
    ends.set_xticks([])
    ends.set_ylabel("perplexity above lossless, per cent")
    curves.set(xlabel="step", ylabel="loss on held-out text, nats per byte")
    for axis in (curves, ends):
        axis.spines[["top", "right"]].set_visible(False)
        explain(axis, fontsize=8)
    figure.suptitle(
        "64 workers, a LLaMA of 106 M parameters, 10 % lost in both stages; bars: two standard errors, dots: seeds",
        fontsize=11,
    )
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main("large", __doc__, runs, draw)

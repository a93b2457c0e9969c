"""What does the number of workers change, from 4 to 1,024: what loss costs, and what simulating them costs?

Perplexity: a small model, as many sequences in every step whoever has them, 10 % loss. Time and memory: a model
of 4.8 M parameters, one sequence a worker, 128 of them at a time.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from grid import GPU, Run, above, explain, main, mean_and_bar, mean_text, seeds

from stormtorch.cli.plots.train import COLOURS
from stormtorch.studies.settings import SimSettings

WORKERS = (4, 16, 64, 256, 1024)
TIMED = (4, 16, 64, 128, 256, 512, 1024, 2048, 4096)
SEQUENCES = 1024
SEEDS = 3
LOSS = 0.1


def runs(chosen: argparse.Namespace) -> list[Run]:
    """Timing first: it is short."""
    on_gpu = GPU if chosen.device == "cuda" else {}
    common: dict[str, Any] = {"data": chosen.data / "wikitext-2", "loss": LOSS, "device": chosen.device, **on_gpu}
    found = [
        Run(
            key=f"timed/{workers}/0",
            settings=SimSettings(
                policies=("lead",),
                workers=workers,
                width=256,
                layers=6,
                context=128,
                batch=1,
                steps=8,
                at_once=min(workers, 128),
                **common,
            ),
        )
        for workers in TIMED
    ]
    for workers in WORKERS:
        for seed in range(SEEDS):
            for policy in ("lossless", "lead", "plain"):
                settings = SimSettings(
                    policies=(policy,),
                    workers=workers,
                    batch=SEQUENCES // workers,
                    steps=200,
                    held_out=1024,
                    at_once=min(workers, 256),
                    first_seed=seed,
                    **common,
                )
                found.append(Run(key=f"{policy}/{workers}/{seed}", settings=settings))
    return found


def draw(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Perplexity, seconds and memory against the number of workers."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.5, 4.2), layout="constrained")
    cost, seconds, memory = figure.subplots(1, 3)
    for policy in ("plain", "lead"):
        points = []
        for workers in WORKERS:
            more = above(found, f"{policy}/{workers}", f"lossless/{workers}")
            if more:
                points.append((workers, *mean_and_bar(more)))
                print(f"{policy} {workers} workers: {mean_text(more)} %")
        if points:
            x, y, error = zip(*points, strict=True)
            cost.errorbar(x, y, error, color=COLOURS[policy], marker="o", markersize=4, capsize=3, label=policy)
    cost.axhline(0, color="#adb5bd", linewidth=1, zorder=0)
    cost.set(
        ylabel=f"perplexity above lossless at {100 * LOSS:g} % loss, per cent", title="0.12 M parameters, 200 steps"
    )
    explain(cost)
    timed = [(workers, run) for workers in TIMED for run in seeds(found, f"timed/{workers}")]
    for workers, run in timed:
        print(f"timed {workers}: {run['step_s']:.4f} s, {(run['peak_bytes'] or 0) / 1e9:.2f} GB, {run['how']}")
    many = [workers for workers, _ in timed]
    seconds.loglog(many, [run["step_s"] for _, run in timed], color="#1c7ed6", marker="o", markersize=4)
    if timed:
        most, last = timed[-1]
        seconds.loglog(many, [last["step_s"] * workers / most for workers in many], color="#adb5bd", linestyle=":")
    seconds.set(ylabel="seconds a step", title="4.8 M parameters (dotted: in proportion)")
    memory.loglog(many, [(run["peak_bytes"] or 1) / 1e9 for _, run in timed], color="#1c7ed6", marker="o", markersize=4)
    memory.loglog(many, [4 * 4.81e6 * workers / 1e9 for workers in many], color="#adb5bd", linestyle=":")
    memory.set(ylabel="GB of the GPU, at most", title="4.8 M parameters (dotted: a replica each)")
    for axis in (cost, seconds, memory):
        axis.set_xscale("log", base=2)
        axis.set_xticks([4, 16, 64, 256, 1024], ["4", "16", "64", "256", "1024"])
        axis.set_xlabel("workers")
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main("workers", __doc__, runs, draw)

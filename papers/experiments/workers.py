"""What does the number of workers change, from 4 to 4,096: what loss costs, and what simulating them costs?

Perplexity: a small model, as many sequences in every step whoever has them, 10 % loss. Time and memory: a model
of 4.8 M parameters, one sequence a worker, 128 of them at a time.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grid import GPU, Run, main
from over_seeds import above, explain, mean_and_bar, mean_text, seeds

from stormtorch_lab.cli.plots.train import COLOURS
from stormtorch_lab.studies.settings import SimSettings

WORKERS = (4, 16, 64, 256, 1024)
TIMED = (4, 16, 64, 128, 256, 512, 1024, 2048, 4096)
SEQUENCES = 1024
SEEDS = 3
LOSS = 0.1
# From twice as many workers as are computed at a time, a step is a row of equal parts.
FITTED_FROM = 256


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


def timed(found: dict[str, dict[str, Any]]) -> list[tuple[int, float, float]]:
    """Workers, seconds of a step, and GB of the GPU, of every timed run."""
    return [
        (workers, run["step_s"], (run["peak_bytes"] or 0) / 1e9)
        for workers in TIMED
        for run in seeds(found, f"timed/{workers}")
    ]


def fit(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Start and slope of the line through what was measured from `FITTED_FROM` workers on."""
    x, y = zip(*((workers, value) for workers, value in points if workers >= FITTED_FROM), strict=True)
    slope, start = statistics.linear_regression(x, y)
    return start, slope


def table(found: dict[str, dict[str, Any]]) -> list[str]:
    """Rows of the page's tables: what loss costs by workers, then seconds and memory beside their lines."""
    rows = []
    for workers in WORKERS:
        cells = [mean_text(above(found, f"{policy}/{workers}", f"lossless/{workers}")) for policy in ("plain", "lead")]
        rows.append(f"| {workers:,} | {' % | '.join(cells)} % |")
    rows.append("")
    points = timed(found)
    (start_s, each_s), (start_gb, each_gb) = (fit([(point[0], point[1 + at]) for point in points]) for at in (0, 1))
    for workers, seconds, memory in points:
        line_s, line_gb = start_s + each_s * workers, start_gb + each_gb * workers
        rows.append(
            f"| {workers:,} | {seconds:.4f} | {100 * (seconds / line_s - 1):+.0f} % | {memory:.1f} "
            f"| {100 * (memory / line_gb - 1):+.0f} % |"
        )
    return rows


def draw(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Perplexity, seconds and memory against the number of workers."""
    from matplotlib.figure import Figure

    print("\n".join(table(found)))
    figure = Figure(figsize=(12.5, 4.2), layout="constrained")
    cost, seconds, memory = figure.subplots(1, 3)
    for policy in ("plain", "lead"):
        points = []
        for workers in WORKERS:
            more = above(found, f"{policy}/{workers}", f"lossless/{workers}")
            if more:
                points.append((workers, *mean_and_bar(more)))
        if points:
            x, y, error = zip(*points, strict=True)
            cost.errorbar(x, y, error, color=COLOURS[policy], marker="o", markersize=4, capsize=3, label=policy)
    cost.axhline(0, color="#adb5bd", linewidth=1, zorder=0)
    cost.set(
        ylabel=f"perplexity above lossless at {100 * LOSS:g} % loss, per cent", title="0.12 M parameters, 200 steps"
    )
    explain(cost)
    points = timed(found)
    many = [workers for workers, *_ in points]
    for axis, at in ((seconds, 1), (memory, 2)):
        axis.loglog(many, [point[at] for point in points], color="#1c7ed6", marker="o", markersize=4)
        start, slope = fit([(point[0], point[at]) for point in points])
        axis.loglog(many, [start + slope * workers for workers in many], color="#e8590c", linewidth=1, label="fitted")
        unit = "s" if at == 1 else "GB"
        print(f"fitted: {start:.4f} {unit} and {1000 * slope:.4f} {unit} for each thousand workers")
    seconds.set(ylabel="seconds a step", title="4.8 M parameters")
    memory.loglog(
        many,
        [4 * 4.81e6 * workers / 1e9 for workers in many],
        color="#adb5bd",
        linestyle=":",
        label="a replica each, alone",
    )
    memory.set(ylabel="GB of the GPU, at most", title="4.8 M parameters")
    explain(seconds)
    explain(memory)
    for axis in (cost, seconds, memory):
        axis.set_xscale("log", base=2)
        axis.set_xticks([4, 16, 64, 256, 1024, 4096], ["4", "16", "64", "256", "1024", "4096"])
        axis.set_xlabel("workers")
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main("workers", __doc__, runs, draw)

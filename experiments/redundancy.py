"""Can a narrow wire pay for its losses: int8 with parity, at 40 % loss, beside float32 without?

The model and data of `perplexity.py`: 64 workers, 300 steps. Every run is compared with the lossless one in float32 of
its seed; bytes are those of a worker at a step, in those of float32.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from grid import Run, above, explain, main, mean_text, seeds
from perplexity import scratch

from stormtorch.results.statistics import mean

# Kinds of runs: name, policy, loss and other settings. Those of one wire follow each other, as they share kernels.
KINDS: tuple[tuple[str, str, float, dict[str, Any]], ...] = (
    ("float32/lossless", "lossless", 0.0, {}),
    ("float32/lead/0.4", "lead", 0.4, {}),
    ("int8/lossless", "lossless", 0.0, {"wire": "int8"}),
    ("int8/lead/0.05", "lead", 0.05, {"wire": "int8"}),
    ("int8/lead/0.4", "lead", 0.4, {"wire": "int8"}),
    ("int8/auto/0.4", "lead", 0.4, {"wire": "int8", "redundancy": "auto"}),
)
SEEDS = 8
# Eight seeds leave an error of a few tenths of a per cent; three times as many tell whether that was luck.
MORE_SEEDS = 24
BASE = "float32/lossless"
LABELS = {
    "float32/lossless": "float32, lossless",
    "float32/lead/0.4": "float32, 40 %",
    "int8/lossless": "int8, lossless",
    "int8/lead/0.05": "int8, 5 %",
    "int8/lead/0.4": "int8, 40 %",
    "int8/auto/0.4": "int8, 40 %, parity",
}


def runs(chosen: argparse.Namespace) -> list[Run]:
    """All kinds with the first seeds, then with more."""
    return [
        Run(
            key=f"{name}/{seed}",
            settings=scratch(chosen, policies=(policy,), loss=loss, first_seed=seed, **other),
        )
        for part in (range(SEEDS), range(SEEDS, MORE_SEEDS))
        for name, policy, loss, other in KINDS
        for seed in part
    ]


def draw(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Perplexity against bytes, a dot for each seed."""
    base_bytes = mean([run["bytes_sent"] for run in seeds(found, BASE)])
    points = {}
    for name, *_ in KINDS:
        more, results = above(found, name, BASE), seeds(found, name)
        if not more:
            continue
        share = mean([run["bytes_sent"] for run in results]) / base_bytes
        points[name] = share, more
        arrived = mean([run["arrived"] for run in results])
        first = mean_text([each for each, run in zip(more, results, strict=True) if run["seed"] < SEEDS])
        print(
            f"{LABELS[name]}: {first} % of the first {SEEDS} seeds, {mean_text(more)} % of {len(more)}; "
            f"{share:.3f} of the bytes, {arrived:.4f} there in the end"
        )
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.4), layout="constrained")
    axis = figure.subplots()
    for name, (share, more) in points.items():
        axis.plot([share] * len(more), more, "o", markersize=3, alpha=0.5, label=LABELS[name])
        axis.plot(share, mean(more), "k_", markersize=16)
    axis.axhline(0, color="#adb5bd", linewidth=1, zorder=0)
    axis.set(xlabel="bytes, in those of float32", ylabel="perplexity above lossless float32, per cent")
    axis.set_title("64 workers, 300 steps; dots are seeds, bars means", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    explain(axis, fontsize=8)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main("redundancy", __doc__, runs, draw)

"""Can a narrow wire pay for its losses: int8 with parity, at 40 % loss, beside float32 without?

The model and data of `perplexity.py`: 64 workers, 300 steps. Every run is compared with the lossless one in float32 of
its seed; bytes are those of a worker at a step, in those of float32.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from grid import Run, main
from over_seeds import above, explain, mean_text, seeds
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


def share_of_bytes(found: dict[str, dict[str, Any]], name: str) -> float:
    """Bytes of a step, in those of float32."""
    mine, base = ([run["bytes_sent"] for run in seeds(found, kind)] for kind in (name, BASE))
    return mean(mine) / mean(base)


def table(found: dict[str, dict[str, Any]]) -> list[str]:
    """Rows of the page's table: the first seeds, all of them, bytes, and what was there in the end."""
    rows = []
    for name, *_ in KINDS:
        more, results = above(found, name, BASE), seeds(found, name)
        if more and name != BASE:
            first = mean_text([each for each, run in zip(more, results, strict=True) if run["seed"] < SEEDS])
            arrived = 100 * mean([run["arrived"] for run in results])
            rows.append(
                f"| {LABELS[name]} | {first} % | {mean_text(more)} % ({len(more)}) "
                f"| {share_of_bytes(found, name):.3f} | {arrived:.1f} % |"
            )
    return rows


def draw(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Perplexity against bytes, a dot for each seed."""
    from matplotlib.figure import Figure

    print("\n".join(table(found)))
    points = {name: (share_of_bytes(found, name), above(found, name, BASE)) for name, *_ in KINDS if seeds(found, name)}

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

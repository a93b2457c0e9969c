"""Can a narrow wire pay for its losses: int8 with parity, at 40 % loss, beside float32 without?

The model and data of `perplexity.py`: 64 workers, 300 steps. Every run is compared with the lossless one in float32 of
its seed; bytes are those of a worker at a step, in those of float32.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from grid import Run, main
from over_seeds import above, mean_and_bar, mean_text, seeds
from perplexity import scratch

from stormtorch.telemetry.statistics import mean

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
    """Rows of the page's table: the first seeds, all of them and their median, bytes, and what was there in the end."""
    rows = []
    for name, *_ in KINDS:
        more, results = above(found, name, BASE), seeds(found, name)
        if more and name != BASE:
            first = mean_text([each for each, run in zip(more, results, strict=True) if run["seed"] < SEEDS])
            arrived = 100 * mean([run["arrived"] for run in results])
            rows.append(
                f"| {LABELS[name]} | {first} % | {mean_text(more)} % ({len(more)}) | {statistics.median(more):+.2f} % "
                f"| {share_of_bytes(found, name):.3f} | {arrived:.1f} % |"
            )
    return rows


def draw(found: dict[str, dict[str, Any]], path: Path) -> None:
    """A line of dots for each kind, one for each seed, with their mean and its error."""
    from matplotlib.figure import Figure

    print("\n".join(table(found)))
    shown = [(name, above(found, name, BASE)) for name, *_ in KINDS if name != BASE and seeds(found, name)]
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axis = figure.subplots()
    for row, (name, more) in enumerate(shown):
        colour = "#2f9e44" if "parity" in LABELS[name] else "#868e96" if "lossless" in name else "#d9480f"
        axis.plot(more, [row] * len(more), "o", markersize=4, alpha=0.4, color=colour)
        average, bar = mean_and_bar(more)
        axis.errorbar(average, row, xerr=bar, fmt="|", markersize=18, capsize=4, color="#212529")
    labels = [f"{LABELS[name]}\n{share_of_bytes(found, name):.2f} of the bytes" for name, _ in shown]
    axis.set_yticks(range(len(shown)), labels)
    axis.margins(y=0.15)
    axis.invert_yaxis()
    axis.axvline(0, color="#adb5bd", linewidth=1, zorder=0)
    axis.set_xlabel("perplexity above lossless float32 of the same seed, per cent")
    axis.set_title("64 workers, 300 steps; dots are seeds, bars means and two standard errors", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main("redundancy", __doc__, runs, draw)

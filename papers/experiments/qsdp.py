"""What do few bits cost where nothing is lost: QSDP in 8 and 4 bits, beside float32?

8 workers with 16 sequences each train the small model on WikiText-2. Both stages, weights and gradients, have the same
bits. Run it from the root of the repository: policies are classes of this file.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from grid import Run, main
from over_seeds import above, explain, mean_text, seeds
from small import small

from stormtorch.telemetry.statistics import mean
from stormtorch_lab import QSDP

SEEDS = 3
KINDS = {"float32": "Plain", "8 bits": "Eight", "4 bits": "Four"}
BASE = "float32"


@dataclass(frozen=True, kw_only=True)
class Plain(QSDP):
    """Nothing is rounded."""

    bits: Literal[32, 8, 4] = 32


@dataclass(frozen=True, kw_only=True)
class Eight(QSDP):
    """255 steps for each 1,024 neighbours."""


@dataclass(frozen=True, kw_only=True)
class Four(QSDP):
    """15 steps for each 128 neighbours."""

    bits: Literal[32, 8, 4] = 4


def runs(chosen: argparse.Namespace) -> list[Run]:
    """All kinds, seed after seed."""
    return [
        Run(
            key=f"{name}/{seed}",
            settings=small(
                chosen,
                policies=(f"papers/experiments/qsdp.py:{kind}",),
                workers=8,
                batch=16,
                loss=0.0,
                first_seed=seed,
            ),
        )
        for seed in range(SEEDS)
        for name, kind in KINDS.items()
    ]


def draw(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Perplexity above that of float32, a dot for each seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axis = figure.subplots()
    sent = {name: mean([run["bytes_sent"] for run in seeds(found, name)] or [math.nan]) for name in KINDS}
    for place, name in enumerate(KINDS):
        results, more = seeds(found, name), above(found, name, BASE)
        if not more:
            continue
        perplexities = [math.exp(run["val_loss"]) for run in results]
        print(
            f"{name}: perplexity {mean_text(perplexities, '.3f')}, {mean_text(more)} % above float32 in the same "
            f"{len(more)} seeds; {sent[name] / sent[BASE]:.3f} of its bytes"
        )
        axis.plot(
            [place] * len(more), more, "o", markersize=5, alpha=0.6, label=f"{sent[name] / sent[BASE]:.2f} of the bytes"
        )
        axis.plot(place, mean(more), "k_", markersize=20)
    axis.axhline(0, color="#adb5bd", linewidth=1, zorder=0)
    axis.set_xticks(range(len(KINDS)), list(KINDS))
    axis.set_ylabel("perplexity above float32, per cent")
    axis.set_title("8 workers, 300 steps; dots are seeds, bars means", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    explain(axis, fontsize=8)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main("qsdp", __doc__, runs, draw)

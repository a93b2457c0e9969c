"""What do lost gradients cost by themselves, where the broadcast is exact? Is it what a smaller batch costs?

Owners average what arrived, so a share p of lost gradients should cost as much as a batch that is smaller by p: no
more, and no less. 16 workers, 40 % lost, 5 sequences a worker against 3 of which nothing is lost.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from grid import Run, main
from over_seeds import above, mean_text
from small import small

from stormtorch.telemetry.statistics import mean

SEEDS = 8
LOSS = 0.4
RATE = 1e-3
BASE = "lossless, 5 sequences"
# A worker that knows what was lost could add it to its next gradient: nothing is wasted, but it is late.
CARRIED = "gradients lost and sent later, 5 sequences"
EXACT_BROADCAST: dict[str, Any] = {"budget": 0.0, "gradient_budget": 1.0}
KINDS: dict[str, dict[str, Any]] = {
    BASE: {"policies": ("lossless",), "batch": 5},
    "lossless, 3 sequences": {"policies": ("lossless",), "batch": 3},
    "lossless, 5 sequences, higher rate": {"policies": ("lossless",), "batch": 5, "lr": RATE / math.sqrt(1 - LOSS)},
    "gradients lost, 5 sequences": {
        "policies": ("lead",),
        "batch": 5,
        "loss": LOSS,
        **EXACT_BROADCAST,
    },
    "gradients lost, 8 sequences": {
        "policies": ("lead",),
        "batch": 8,
        "loss": LOSS,
        **EXACT_BROADCAST,
    },
    "gradients lost, 5 sequences, higher rate": {
        "policies": ("lead",),
        "batch": 5,
        "loss": LOSS,
        **EXACT_BROADCAST,
        "lr": RATE / math.sqrt(1 - LOSS),
    },
    CARRIED: {"policies": ("lead",), "batch": 5, "loss": LOSS, **EXACT_BROADCAST},
    "both lost, lead, 5 sequences": {"policies": ("lead",), "batch": 5, "loss": LOSS},
}


def runs(chosen: argparse.Namespace) -> list[Run]:
    """Every kind with the first seed, then with the next."""
    return [
        Run(
            key=f"{kind}/{seed}",
            settings=small(chosen, first_seed=seed, **{"lr": RATE, **options}),
            carry=kind == CARRIED,
        )
        for seed in range(SEEDS)
        for kind, options in KINDS.items()
    ]


def table(found: dict[str, dict[str, Any]]) -> list[str]:
    """Rows of the page's table."""
    return [f"| {kind} | {mean_text(above(found, kind, BASE))} % |" for kind in KINDS if kind != BASE]


def draw(found: dict[str, dict[str, Any]], path: Path) -> None:
    """A bar for each kind, a dot for each seed."""
    from matplotlib.figure import Figure

    print("\n".join(table(found)))
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axis = figure.subplots()
    shown = [(kind, above(found, kind, BASE)) for kind in KINDS if kind != BASE]
    for row, (kind, more) in enumerate(shown):
        if more:
            colour = "#868e96" if kind.startswith("lossless") else "#d9480f"
            axis.barh(row, mean(more), 0.6, color=colour)
            axis.plot(more, [row] * len(more), "k.", markersize=4)
    axis.set_yticks(range(len(shown)), [kind for kind, _ in shown])
    axis.invert_yaxis()
    axis.axvline(0, color="#212529", linewidth=1)
    axis.set_xlabel("perplexity above lossless with 5 sequences a worker, per cent")
    axis.set_title(f"16 workers, {100 * LOSS:g} % lost, broadcast exact unless said", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main("gradients", __doc__, runs, draw)

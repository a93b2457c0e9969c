"""Does the lead survive bursts? 64 workers, 20 % loss in runs of 1, 8 and 64 packets."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from grid import Run, main
from over_seeds import above, explain, mean_text, seeds
from perplexity import scratch

from stormtorch.telemetry.statistics import mean
from stormtorch_lab.cli.plots.train import COLOURS

BURSTS = (1.0, 8.0, 64.0)
LOSS = 0.2
SEEDS = 3


def runs(chosen: argparse.Namespace) -> list[Run]:
    """The longest bursts first."""
    found = []
    for seed in range(SEEDS):
        settings = scratch(chosen, policies=("lossless",), first_seed=seed)
        found.append(Run(key=f"lossless/{seed}", settings=settings))
        for burst in reversed(BURSTS):
            for policy in ("lead", "plain"):
                settings = scratch(chosen, policies=(policy,), loss=LOSS, burst=burst, first_seed=seed)
                found.append(Run(key=f"{policy}/{burst:g}/{seed}", settings=settings))
    return found


def table(found: dict[str, dict[str, Any]]) -> list[str]:
    """Rows of the page's table: perplexity above lossless, and how old copies are."""
    rows = []
    for burst in BURSTS:
        cells = [f"{mean_text(above(found, f'{policy}/{burst:g}', 'lossless'))} %" for policy in ("plain", "lead")]
        ages = [{int(age): share for age, share in run["lag"].items()} for run in seeds(found, f"lead/{burst:g}")]
        old = mean([sum(age * share for age, share in each.items()) for each in ages])
        rows.append(f"| {burst:g} | {' | '.join(cells)} | {old:.2f} | {max(max(each) for each in ages)} |")
    return rows


def draw(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Perplexity and the ages of copies, against the length of bursts."""
    from matplotlib.figure import Figure

    print("\n".join(table(found)))
    figure = Figure(figsize=(9.5, 4.2), layout="constrained")
    cost, lag = figure.subplots(1, 2)
    for policy in ("lead", "plain"):
        points = [(burst, above(found, f"{policy}/{burst:g}", "lossless")) for burst in BURSTS]
        points = [(burst, more) for burst, more in points if more]
        if points:
            cost.plot(
                *zip(*((burst, mean(more)) for burst, more in points), strict=True),
                "o-",
                color=COLOURS[policy],
                label=policy,
            )
        for burst, more in points:
            cost.plot([burst] * len(more), more, ".", color=COLOURS[policy], markersize=4)
    for burst, shade in zip(BURSTS, ("#74c0fc", "#1c7ed6", "#0b4884"), strict=True):
        for run in seeds(found, f"lead/{burst:g}")[:1]:
            ages = sorted((int(age), share) for age, share in run["lag"].items())
            lag.semilogy(*zip(*ages, strict=True), "o-", markersize=3, color=shade, label=f"bursts of {burst:g}")
    lag.semilogy(range(10), [0.8 * 0.2**age for age in range(10)], "k:", label="0.8 x 0.2^lag, independent")
    cost.set(xscale="log", xlabel="mean length of a burst, packets", ylabel="perplexity above lossless, per cent")
    cost.set_xticks(BURSTS, [f"{burst:g}" for burst in BURSTS])
    lag.set(xlabel="lag, steps", ylabel="fraction of all copies", ylim=(1e-6, 1.5))
    for axis in (cost, lag):
        explain(axis)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        "64 workers, 300 steps, 20 % lost (left: dots are seeds; right: one seed, last step)",
        fontsize=11,
    )
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main("bursts", __doc__, runs, draw)

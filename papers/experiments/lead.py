"""The lead, studied: too much and too little of it, with other optimizers, early and late; and is it a look-ahead?

16 workers, 300 steps. A factor of 1 is p/(1-p), what makes replicas right on average; 0 is no lead; 2 is what an
estimate of 2p/(1+p) in place of p would give. "Look-ahead" is the same extrapolation where nothing is lost: it mends
nothing.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from grid import Run, main
from over_seeds import above, explain, mean_and_bar, mean_text
from small import small

FACTORS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0)
LOSSES = (0.1, 0.4)
SEEDS = 3
# By name: which, and its learning rate. At 0.2, momentum's seeds differ widely: it is near its limit.
DESCENTS = {"sgd": ("sgd", 0.3), "momentum": ("momentum", 0.2), "momentum-lr0.05": ("momentum", 0.05)}
# At the limit of its stability, with one seed: from before the others were chosen.
FASTEST = {"sgd-lr1": ("sgd", 1.0)}
SMOOTH = (0.5, 0.8)
OPTIMIZERS = {
    "adamw": "#d9480f",
    "momentum": "#d0bfff",
    "momentum-lr0.05": "#862e9c",
    "sgd": "#1c7ed6",
    "sgd-lr1": "#adb5bd",
}
AHEADS = (0.11, 0.22, 0.67, 1.33, 2.0)


def runs(chosen: argparse.Namespace) -> list[Run]:
    """The most telling first."""
    found = []

    def add(key: str, seed: int, policy: str = "lead", **other: Any) -> None:
        more = {name: other.pop(name) for name in ("lead_steps", "lookahead", "smooth") if name in other}
        settings = small(chosen, policies=(policy,), first_seed=seed, **other)
        found.append(Run(key=f"{key}/{seed}", settings=settings, **more))

    for seed in range(SEEDS):
        add("adamw/lossless", seed, "lossless")
        for loss in LOSSES:
            for factor in FACTORS:
                add(f"adamw/{loss:g}/{factor:g}", seed, loss=loss, lead=factor)
        for ahead in AHEADS:
            add(f"ahead/{ahead:g}", seed, loss=0.0, lookahead=ahead)
    for seed in range(SEEDS):
        add("nadam/lossless", seed, "lossless", optimizer="nadam")
        for kept in SMOOTH:
            for loss in LOSSES:
                add(f"smooth/{loss:g}/{kept:g}", seed, loss=loss, smooth=kept)
        add("early/0.4", seed, loss=0.4, lead_steps=(0, 150))
        add("late/0.4", seed, loss=0.4, lead_steps=(150, 300))
        for name, (optimizer, rate) in (DESCENTS | (FASTEST if seed == 0 else {})).items():
            options: dict[str, Any] = {"optimizer": optimizer, "lr": rate}
            add(f"{name}/lossless", seed, "lossless", **options)
            for loss in LOSSES:
                for factor in (0.0, 1.0, 2.0):
                    add(f"{name}/{loss:g}/{factor:g}", seed, loss=loss, lead=factor, **options)
    return found


NAMES = {
    "adamw": "AdamW",
    "momentum-lr0.05": "SGD with momentum, rate 0.05",
    "momentum": "the same, rate 0.2",
    "sgd": "SGD without momentum, rate 0.3",
    "sgd-lr1": "the same, rate 1 (one seed)",
}


def table(found: dict[str, dict[str, Any]]) -> list[str]:
    """Rows of the page's tables: factors of the lead under AdamW; then other optimizers, at 40 %."""
    rows = []
    for loss in LOSSES:
        cells = [mean_text(above(found, f"adamw/{loss:g}/{factor:g}", "adamw/lossless"), "+.1f") for factor in FACTORS]
        rows.append(f"| {100 * loss:g} % | {' | '.join(cells)} |")
    rows.append("")
    for name, label in NAMES.items():
        cells = [
            mean_text(above(found, f"{name}/0.4/{each:g}", f"{name}/lossless"), "+.1f") for each in (0.0, 1.0, 2.0)
        ]
        rows.append(f"| {label} | {' | '.join(cells)} |")
    return rows


def draw(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Perplexity against the factor; and the look-ahead without loss beside it."""
    from matplotlib.figure import Figure

    print("\n".join(table(found)))
    figure = Figure(figsize=(14, 5), layout="constrained")
    by_factor, by_optimizer, by_updates = figure.subplots(1, 3)
    for loss, colour in zip(LOSSES, ("#d9480f", "#862e9c"), strict=True):
        points = _points(found, "adamw", loss, FACTORS)
        if points:
            by_factor.errorbar(
                *zip(*points, strict=True), color=colour, marker="o", capsize=3, label=f"{100 * loss:g} %"
            )
            updates = [(factor * loss / (1 - loss), more, error) for factor, more, error in points]
            by_updates.errorbar(
                *zip(*updates, strict=True), color=colour, marker="o", capsize=3, label=f"{100 * loss:g} % lost"
            )
    for optimizer, colour in OPTIMIZERS.items():
        for loss, style in zip(LOSSES, (":", "-"), strict=True):
            points = _points(found, optimizer, loss, (0.0, 1.0, 2.0))
            if points:
                label = f"{optimizer}, {100 * loss:g} %"
                by_optimizer.errorbar(
                    *zip(*points, strict=True), color=colour, linestyle=style, marker="o", capsize=3, label=label
                )
    points = []
    for ahead in AHEADS:
        more = above(found, f"ahead/{ahead:g}", "adamw/lossless")
        if more:
            points.append((ahead, *mean_and_bar(more)))
            print(f"look-ahead of {ahead:g} updates without loss: {mean_text(more)} %")
    if points:
        by_updates.errorbar(
            *zip(*points, strict=True), color="#1c7ed6", marker="s", capsize=3, label="nothing lost: look-ahead"
        )
    for loss in LOSSES:
        for kept in SMOOTH:
            more = above(found, f"smooth/{loss:g}/{kept:g}", "adamw/lossless")
            print(f"lead along a mean of updates that keeps {kept:g}, {100 * loss:g} %: {mean_text(more)} %")
    print(f"NAdam in place of AdamW, nothing lost: {mean_text(above(found, 'nadam/lossless', 'adamw/lossless'))} %")
    for when in ("early", "late"):
        print(f"lead only {when}, 40 %: {mean_text(above(found, f'{when}/0.4', 'adamw/lossless'))} %")
    by_factor.set(xlabel="lead ÷ p/(1-p)", title="AdamW")
    by_optimizer.set(xlabel="lead ÷ p/(1-p)", title="optimizers (sgd-lr1: SGD at its limit of stability)")
    by_updates.set(xlabel="lead in updates", title="with loss, and without")
    for axis in (by_factor, by_optimizer, by_updates):
        axis.axhline(0, color="#adb5bd", linewidth=1, zorder=0)
        axis.set_yscale("symlog", linthresh=1)
        ticks = (-20, -10, -3, -1, 0, 1, 3, 10, 30, 60)
        axis.set_yticks(ticks, [str(tick) for tick in ticks])
        axis.set_ylabel("perplexity above lossless, per cent")
        # Below: there are curves in every corner.
        explain(
            axis,
            fontsize=8,
            handlelength=3,
            ncols=2 if axis is by_optimizer else 3,
            loc="upper center",
            bbox_to_anchor=(0.5, -0.14),
        )
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle("16 workers, 300 steps; bars: two standard errors; the axis is linear up to 1 %", fontsize=11)
    figure.savefig(path, dpi=150)


def _points(
    found: dict[str, dict[str, Any]], optimizer: str, loss: float, factors: tuple[float, ...]
) -> list[tuple[float, float, float]]:
    points = []
    for factor in factors:
        more = above(found, f"{optimizer}/{loss:g}/{factor:g}", f"{optimizer}/lossless")
        if more:
            points.append((factor, *mean_and_bar(more)))
    return points


if __name__ == "__main__":
    main("lead", __doc__, runs, draw)

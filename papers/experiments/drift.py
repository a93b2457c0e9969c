"""How far do replicas drift apart over time, and do the formulas say it?

16 workers, 300 steps, and 1,500 of AdamW. Drift is also shown over the mean square of one update at that time: the
formulas are about independent updates of mean zero, and updates of real training are neither.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from grid import Run, main
from over_seeds import explain, mean_text, seeds
from small import small

from stormtorch import theory
from stormtorch.telemetry.statistics import mean
from stormtorch_lab.cli.plots.train import COLOURS

LOSSES = (0.1, 0.4)
POLICIES = ("plain", "lead", "model-averaging", "gradient-averaging")
SEEDS = 3
LONG_STEPS = 1500
# In the end the learning rate has fallen, and with it the drift of all but those that drift without bound.
EARLY = 100
# Trainings whose drift the formulas are about: name in keys, and what they are.
MEASURED = {"": "AdamW", "-long": f"AdamW, {LONG_STEPS:,} steps", "-sgd": "SGD without momentum"}


def runs(chosen: argparse.Namespace) -> list[Run]:
    """All policies at two losses; momentum-free SGD beside AdamW for the formulas, and a longer training."""
    found = []

    def add(policy: str, kind: str, loss: float, seed: int, **other: Any) -> None:
        settings = small(chosen, policies=(policy,), loss=loss, first_seed=seed, **other)
        found.append(Run(key=f"{policy}{kind}/{loss:g}/{seed}", settings=settings))

    for seed in range(SEEDS):
        for loss in LOSSES:
            for policy in POLICIES:
                add(policy, "", loss, seed)
            for policy in ("plain", "lead"):
                add(policy, "-sgd", loss, seed, optimizer="sgd", lr=1.0)
                add(policy, "-long", loss, seed, steps=LONG_STEPS)
    return found


def ratios(run: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Steps, and drift over the mean square of one update at each."""
    rows = [(step, pair / update) for step, pair, _, update in run["drift_curve"][1:] if pair and update]
    return [step for step, _ in rows], [ratio for _, ratio in rows]


def table(found: dict[str, dict[str, Any]]) -> list[str]:
    """Rows of the page's tables: drift over one update, medians of the second half of training; then over plain's."""
    rows = []
    for kind, name in MEASURED.items():
        cells = []
        for loss in LOSSES:
            medians = []
            for policy in ("plain", "lead"):
                halves = [ratios(run)[1] for run in seeds(found, f"{policy}{kind}/{loss:g}")]
                medians.append(mean_text([statistics.median(half[len(half) // 2 :]) for half in halves], ".2f"))
            cells.append(" / ".join(medians))
        rows.append(f"| {name}, plain / with the lead | {' | '.join(cells)} |")
    rows.append("")
    for policy in POLICIES:
        cells = []
        for loss in LOSSES:
            pairs = list(zip(seeds(found, f"{policy}/{loss:g}"), seeds(found, f"plain/{loss:g}"), strict=True))
            for step in (EARLY, None):
                over_plain = [_drift_at(run, step) / _drift_at(plain, step) for run, plain in pairs]
                cells.append(mean_text(over_plain, ".2f" if mean(over_plain) < 100 else ",.0f"))
        rows.append(f"| {policy.replace('-', ' ')} | {' | '.join(cells)} |")
    return rows


def _drift_at(run: dict[str, Any], step: int | None) -> float:
    """Drift after a step, or in the end."""
    if step is None:
        return float(run["drift"])
    return next(float(pair) for at, pair, _, _ in run["drift_curve"] if at == step)


def draw(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Drift by step: as it is, and over one update beside the formulas."""
    from matplotlib.figure import Figure

    print("\n".join(table(found)))

    losses = [loss for loss in LOSSES if any(seeds(found, f"{policy}/{loss:g}") for policy in POLICIES)]
    figure = Figure(figsize=(6.25 * max(len(losses), 1), 7.4), layout="constrained")
    axes = figure.subplots(2, max(len(losses), 1), squeeze=False)
    for column, loss in enumerate(losses):
        raw, relative = axes[0, column], axes[1, column]
        for policy in POLICIES:
            for number, run in enumerate(seeds(found, f"{policy}/{loss:g}")):
                points = [(step, pair) for step, pair, _, _ in run["drift_curve"] if pair]
                label = None if number else policy.replace("-", " ")
                raw.plot(*zip(*points, strict=True), color=COLOURS[policy], linewidth=1, label=label)
        raw.set_yscale("log")
        raw.set(
            title=f"{100 * loss:g} % lost, AdamW (16 workers, a line for each seed)",
            ylabel="drift: mean squared difference of two replicas",
        )
        explain(raw, fontsize=8)
        for name, style in (("", "-"), ("-sgd", "--")):
            for policy in ("plain", "lead"):
                for number, run in enumerate(seeds(found, f"{policy}{name}/{loss:g}")):
                    label = None if number else f"{policy}, {MEASURED[name]}"
                    relative.plot(*ratios(run), style, color=COLOURS[policy], linewidth=1, label=label)
        lead = theory.lead(loss)
        relative.axhline(theory.pair_drift(loss), color="#212529", linewidth=1.2, label="2p/(1-p²), exact")
        relative.axhline(
            theory.pair_drift_published(loss),
            color="#212529",
            linewidth=1.2,
            linestyle=":",
            label="2p/(1+p), published",
        )
        relative.axhline(
            theory.pair_drift(loss, lead=lead),
            color="#868e96",
            linewidth=1.2,
            linestyle="-.",
            label="2p/(1-p)², with the lead or for constant updates",
        )
        relative.set_yscale("log")
        relative.set(
            title=f"{100 * loss:g} % lost, AdamW and SGD",
            xlabel="step",
            ylabel="drift ÷ mean square of an update",
            ylim=(0.0005, 30),
        )
        explain(relative, fontsize=8, ncols=2, loc="lower right")
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main("drift", __doc__, runs, draw)

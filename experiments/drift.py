"""How far do replicas drift apart over time, and do the formulas say it?

16 workers, 300 steps. Drift is also shown over the mean square of one update at that time: the formulas are about
independent updates of mean zero, and updates of real training are neither.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from grid import Run, explain, main, seeds
from small import small

from stormtorch import theory
from stormtorch.cli.plots.train import COLOURS

LOSSES = (0.1, 0.4)
POLICIES = ("plain", "lead", "model-averaging", "gradient-averaging")


def runs(chosen: argparse.Namespace) -> list[Run]:
    """All policies at two losses; momentum-free SGD beside AdamW for the formulas."""
    found = []
    for loss in LOSSES:
        for policy in POLICIES:
            found.append(Run(key=f"{policy}/{loss:g}/0", settings=small(chosen, policies=(policy,), loss=loss)))
        for policy in ("plain", "lead"):
            settings = small(chosen, policies=(policy,), loss=loss, optimizer="sgd", lr=1.0)
            found.append(Run(key=f"{policy}-sgd/{loss:g}/0", settings=settings))
    return found


def draw(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Drift by step: as it is, and over one update beside the formulas."""
    from matplotlib.figure import Figure

    losses = [loss for loss in LOSSES if any(seeds(found, f"{policy}/{loss:g}") for policy in POLICIES)]
    figure = Figure(figsize=(6.25 * max(len(losses), 1), 7.4), layout="constrained")
    axes = figure.subplots(2, max(len(losses), 1), squeeze=False)
    for column, loss in enumerate(losses):
        raw, relative = axes[0, column], axes[1, column]
        for policy in POLICIES:
            for run in seeds(found, f"{policy}/{loss:g}"):
                points = [(step, pair) for step, pair, _, _ in run["drift_curve"] if pair]
                raw.plot(*zip(*points, strict=True), color=COLOURS[policy], label=policy.replace("-", " "))
                print(f"{policy} {loss}: drift at the end {run['drift']:.3e}")
        raw.set_yscale("log")
        raw.set(
            title=f"{100 * loss:g} % lost, AdamW (16 workers, one seed)",
            ylabel="drift: mean squared difference of two replicas",
        )
        explain(raw, fontsize=8)
        for name, style, label in (("", "-", "AdamW"), ("-sgd", "--", "SGD without momentum")):
            for policy in ("plain", "lead"):
                for run in seeds(found, f"{policy}{name}/{loss:g}"):
                    rows = [
                        (step, pair / update) for step, pair, _, update in run["drift_curve"][1:] if pair and update
                    ]
                    steps, ratios = zip(*rows, strict=True)
                    relative.plot(steps, ratios, style, color=COLOURS[policy], linewidth=1, label=f"{policy}, {label}")
                    half = sorted(ratios[len(ratios) // 2 :])
                    print(
                        f"{policy}{name} {loss}: median of the second half {half[len(half) // 2]:.3f} updates squared"
                    )
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

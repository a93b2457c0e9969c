"""A picture of convergence: validation loss against the seconds of training."""

from pathlib import Path
from typing import TYPE_CHECKING

from stormtorch.cli.plots.bench import COLOURS
from stormtorch.cli.plots.labels import label_ends
from stormtorch.results.text import condition_text

if TYPE_CHECKING:
    from stormtorch.bench.convergence import ConvergenceReport


def plot_convergence(report: "ConvergenceReport", path: Path) -> None:
    """Draws a line per backend into `path`, whose ending chooses the format."""
    from matplotlib.figure import Figure

    conditions = report.conditions
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axis = figure.subplots()
    for curve in report.curves:
        label = curve.backend + (" (given up)" if curve.gave_up else "")
        axis.plot(curve.clock_s, curve.losses, color=COLOURS[curve.backend], marker=".", label=label)
        reached_s = report.reached_s(curve)
        if reached_s is not None:
            axis.axvline(reached_s, color=COLOURS[curve.backend], linestyle=":", linewidth=1)
    if report.target is not None:
        axis.axhline(report.target, color="black", linestyle=":", linewidth=1)
    axis.set_xlabel("seconds of training")
    axis.set_ylabel("validation loss, nats per byte")
    axis.set_xlim(left=0)
    label_ends(axis)
    axis.spines[["top", "right"]].set_visible(False)
    where = condition_text(conditions["requested"]) if "requested" in conditions else "loopback"
    figure.suptitle(f"time to the same loss, {conditions['ranks']} ranks, {where}", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)

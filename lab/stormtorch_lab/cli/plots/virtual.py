"""Plot of a service beside a training in virtual time, with the published values."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stormtorch.telemetry.text import rate_text

if TYPE_CHECKING:
    from stormtorch_lab.studies.colocation.sweep import Seeds

_COLOURS = ("#1971c2", "#d9480f", "#c2255c", "#2f9e44")
PUBLISHED = (0.10, 1.2)
"""Published result: the allowed loss, and the speed-up of the service that it exceeds."""


def plot_virtual(study: "Seeds", targets_s: Sequence[float], path: Path) -> None:
    """Draws speed-up against allowed loss, and requests at a fixed mean, into `path`."""
    from matplotlib.figure import Figure

    base = study.sweep.base
    figure = Figure(figsize=(11.0, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    gains = study.gains()
    for colour, rate in zip(_COLOURS, study.sweep.requests, strict=False):
        points = [(100 * each.allowed, each.best) for each in gains if each.requests_per_s == rate and each.best]
        left.plot(
            [at for at, _ in points],
            [best.speedup for _, best in points],
            color=colour,
            marker="o",
            label=f"{rate:g} requests/s",
        )
        for at, best in points:
            left.plot([at, at], [min(best.speedups), max(best.speedups)], color=colour, linewidth=1.0, alpha=0.6)
    left.plot(100 * PUBLISHED[0], PUBLISHED[1], marker="^", color="#495057", linestyle="none", markersize=9)
    left.annotate("published: more than 1.2", (100 * PUBLISHED[0], PUBLISHED[1]), (10, -12), textcoords="offset points")
    left.axhline(1.0, color="#adb5bd", linewidth=0.8)
    left.set(xlabel="loss of the training that is allowed, %", ylabel="speed-up of the service's mean", xlim=(0, None))
    left.legend(fontsize=8, frameon=False)
    slack = max(study.sweep.slacks)
    for share, style in ((None, "--"), (min(study.sweep.shares), "-")):
        curve = sorted(
            (each.requests_per_s, 1e3 * each.mean_s)
            for each in study.cases()
            if each.low_share == share and each.slack == slack
        )
        name = "equal priority" if share is None else f"service preferred, training keeps {share:g}"
        right.plot(*zip(*curve, strict=True), style, color="#212529", marker=".", label=name)
    for target_s in targets_s:
        right.axhline(1e3 * target_s, color="#adb5bd", linewidth=0.8)
    right.set(xlabel="requests per second", ylabel="mean completion time, ms", yscale="log")
    right.set_yticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
    right.minorticks_off()
    right.legend(fontsize=8, frameon=False)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    total = base.hosts * float(base.training)
    figure.suptitle(
        f"{base.hosts} hosts at {rate_text(float(base.rate))}, {rate_text(total)} of training in all, answers of "
        f"{base.response_bytes / 1e3:g} KB, in virtual time ({study.sweep.seeds} seeds)",
        fontsize=10.5,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)

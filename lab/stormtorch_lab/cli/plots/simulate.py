"""Plots of simulations: validation loss, its difference to lossless, and drift of the replicas."""

from pathlib import Path

from stormtorch_lab.cli.plots.train import colours_of, draw_validation
from stormtorch_lab.cli.tables.simulate import title_text
from stormtorch_lab.studies.results import SimReport


def plot_simulation(report: SimReport, path: Path) -> None:
    """Draws three panels into `path`; its ending is the format. Seeds share a colour."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), layout="constrained")
    by_step, against, drift = figure.subplots(1, 3)
    colours = colours_of(report.settings.labels)
    draw_validation(report.results, colours, by_step, against)
    apart = False
    for result in report.results:
        # A logarithmic axis cannot show zero.
        points = [(step, pair) for step, pair, _, _ in result.drift_curve if pair]
        if points:
            drift.plot(*zip(*points, strict=True), color=colours[result.policy], linewidth=1)
            apart = True
    if apart:
        drift.set_yscale("log")
        drift.set(xlabel="step", ylabel="squared difference of two replicas")
    else:
        drift.set_axis_off()
        drift.text(0.5, 0.5, "replicas were the same", ha="center", va="center", transform=drift.transAxes)
    drift.spines[["top", "right"]].set_visible(False)
    lost = f"{100 * report.measured['loss']:.1f} % of the chunks did not arrive"
    figure.suptitle(f"{title_text(report)}\n{lost}", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)

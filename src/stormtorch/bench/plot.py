"""A picture of an all-reduce benchmark: every round a dot, every median a line."""

from pathlib import Path
from typing import TYPE_CHECKING

from stormtorch.bench.settings import BadSetting

if TYPE_CHECKING:
    from stormtorch.bench.allreduce import AllReduceReport

_COLOURS = {"storm": "#d9480f", "storm-lossy": "#f59f00", "gloo": "#495057"}


def check_plot(path: Path) -> None:
    """Raises `BadSetting` where no picture could be made, before anything is measured."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise BadSetting("plot", "needs matplotlib: pip install matplotlib") from error
    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        raise BadSetting("plot", f"must end with one of {', '.join('.' + kind for kind in sorted(kinds))}, got {path}")


def plot_allreduce(report: "AllReduceReport", path: Path) -> None:
    """Draws one panel per size into `path`; its ending chooses the format."""
    from matplotlib.figure import Figure

    conditions = report.conditions
    sizes: list[float] = conditions["mb"]
    names: list[str] = conditions["backends"]
    figure = Figure(figsize=(2.4 + 3.2 * len(sizes), 4.2), layout="constrained")
    panels = figure.subplots(1, len(sizes), squeeze=False)[0]
    for panel, mb in zip(panels, sizes, strict=True):
        for position, name in enumerate(names):
            result = next(result for result in report.results if result.mb == mb and result.backend == name)
            times_ms = [1e3 * seconds for seconds in result.times_s]
            colour = _COLOURS[name]
            # Rounds from left to right, so that drift and spikes show.
            across = [position - 0.3 + 0.6 * (i + 0.5) / len(times_ms) for i in range(len(times_ms))]
            panel.bar(position, 1e3 * result.median_s, width=0.7, color=colour, alpha=0.25)
            panel.scatter(across, times_ms, s=10, color=colour, linewidths=0)
            panel.hlines(1e3 * result.median_s, position - 0.35, position + 0.35, color=colour, linewidth=2)
        ideal_ms = 1e3 * next(result.ideal_s for result in report.results if result.mb == mb)
        panel.axhline(ideal_ms, color="black", linestyle=":", linewidth=1)
        panel.text(len(names) - 0.5, ideal_ms, "ideal", ha="right", va="bottom", fontsize=8)
        panel.set_xlim(-0.5, len(names) - 0.5)
        panel.set_xticks(range(len(names)), names)
        panel.set_ylim(bottom=0)
        panel.set_title(f"{mb:g} MB")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("slowest rank of a round, ms (bar: median)")
    title = f"all-reduce, {conditions['hosts']} ranks on loopback, {conditions['dtype']}"
    if conditions["loss_requested"]:
        title += f"\n{100 * conditions['loss_measured']:.1f} % of the storm backends' datagrams lost, none of gloo's"
    figure.suptitle(title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)

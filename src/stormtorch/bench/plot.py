"""A picture of an all-reduce benchmark: every round a dot, every median a line."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from stormtorch.bench.settings import BadSetting

if TYPE_CHECKING:
    from stormtorch.bench.results import AllReduceReport

COLOURS = {
    "storm": "#d9480f",
    "storm-lossy": "#f59f00",
    "gloo": "#495057",
    "gloo-bbr": "#1c7ed6",
    "gloo-cubic": "#5f3dc4",
}
"""Of the backends, in all pictures."""


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
    backends: list[str] = conditions["backends"]
    figure = Figure(figsize=(2.4 + 0.8 * len(sizes) * (1 + len(backends)), 4.2), layout="constrained")
    panels = figure.subplots(1, len(sizes), squeeze=False)[0]
    for panel, mb in zip(panels, sizes, strict=True):
        results = [result for result in report.results if result.mb == mb]
        for result in results:
            position = backends.index(result.backend)
            times_ms = [1e3 * seconds for seconds in result.times_s]
            colour = COLOURS[result.backend]
            # Rounds from left to right, so that drift and spikes show.
            across = [position - 0.3 + 0.6 * (i + 0.5) / len(times_ms) for i in range(len(times_ms))]
            panel.bar(position, 1e3 * result.median_s, width=0.7, color=colour, alpha=0.25)
            panel.scatter(across, times_ms, s=10, color=colour, linewidths=0)
            panel.hlines(1e3 * result.median_s, position - 0.35, position + 0.35, color=colour, linewidth=2)
            if result.gave_up:
                panel.annotate("not done", (across[-1], times_ms[-1]), fontsize=8, ha="right", va="bottom")
        ideal_s = next((result.ideal_s for result in results), None)
        if ideal_s is not None:
            panel.axhline(1e3 * ideal_s, color="black", linestyle=":", linewidth=1)
            panel.text(len(backends) - 0.5, 1e3 * ideal_s, "ideal", ha="right", va="bottom", fontsize=8)
        panel.set_xlim(-0.5, len(backends) - 0.5)
        panel.set_xticks(range(len(backends)), [name.replace("-", "\n") for name in backends])
        panel.set_ylim(bottom=0)
        panel.set_title(f"{mb:g} MB")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("slowest rank of a round, ms (bar: median)")
    figure.suptitle(_title(conditions), fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _title(conditions: dict[str, Any]) -> str:
    from stormtorch.bench.tables import network_text

    lost = f"{100 * conditions['loss_measured']:.1f} %"
    if "requested" in conditions:
        where, loss = network_text(conditions["requested"]), f"\n{lost} of all backends' packets lost"
    else:
        where, loss = "loopback", f"\n{lost} of the storm backends' datagrams lost, none of gloo's"
    title = f"all-reduce, {conditions['hosts']} ranks, {where}, {conditions['dtype']}"
    return title + (loss if conditions["loss_measured"] else "")

"""A picture of a sweep: time over loss, one panel per rate and round trip."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from stormtorch.bench.plot import COLOURS
from stormtorch.bench.tables import loss_of, network_text

if TYPE_CHECKING:
    from stormtorch.bench.sweep import SweepPoint, SweepReport

_MARKERS = {"storm": "o", "storm-lossy": "s", "gloo": "v", "gloo-bbr": "^", "gloo-cubic": "D"}
_COLUMNS = 3


def plot_sweep(report: "SweepReport", path: Path) -> None:
    """Draws into `path`; its ending chooses the format."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    by_network: dict[str, list[SweepPoint]] = {}
    for point in report.points:
        by_network.setdefault(network_text(point.requested), []).append(point)
    columns = min(len(by_network), _COLUMNS)
    rows = -(-len(by_network) // columns)
    figure = Figure(figsize=(1.2 + 3.1 * columns, 1.6 + 2.7 * rows), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False, sharey=True).flat)
    backends: list[str] = report.conditions["backends"]
    for panel, (network, points) in zip(panels, by_network.items(), strict=False):
        _draw(panel, points, backends)
        panel.set_title(network, fontsize=10)
    for panel in panels[len(by_network) :]:
        panel.set_visible(False)
    handles: list[Any] = [
        Line2D([], [], color=COLOURS[name], marker=_MARKERS[name], markersize=5, label=name) for name in backends
    ]
    handles.append(Line2D([], [], color="black", linestyle=":", label="ideal"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    figure.supylabel("time / ideal (median; bars to the worst)", fontsize=10)
    figure.supxlabel("packets lost, asked", fontsize=10)
    figure.suptitle(f"all-reduce over {report.conditions['hosts']} hosts", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _draw(panel: Any, points: "list[SweepPoint]", backends: list[str]) -> None:
    # Evenly spaced: a logarithmic axis has no place for the network that loses nothing.
    points = sorted(points, key=lambda point: loss_of(point.requested))
    panel.set_yscale("log")
    panel.axhline(1, color="black", linestyle=":", linewidth=1)
    for index, name in enumerate(backends):
        found = [(at, result) for at, point in enumerate(points) for result in point.results if result.backend == name]
        # A little aside, so that bars of several backends can be told apart.
        across = [at + 0.07 * (index - (len(backends) - 1) / 2) for at, _ in found]
        ratios = [result.over_ideal for _, result in found]
        colour = COLOURS[name]
        panel.plot(across, ratios, color=colour, marker=_MARKERS[name], markersize=5, linewidth=1.6)
        for x, (_, result) in zip(across, found, strict=True):
            assert result.ideal_s is not None
            median, worst = result.median_s / result.ideal_s, result.worst_s / result.ideal_s
            panel.vlines(x, median, worst, color=colour, linewidth=1, alpha=0.6)
            if result.gave_up:  # it would have gone on
                panel.annotate(
                    "", (x, 1.6 * worst), (x, worst), arrowprops={"arrowstyle": "->", "color": colour}, zorder=3
                )
    panel.set_xticks(range(len(points)), [f"{100 * loss_of(point.requested):g} %" for point in points])
    panel.set_xlim(-0.4, len(points) - 0.6)
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panel.grid(axis="y", which="major", color="#dee2e6", linewidth=0.8)
    panel.spines[["top", "right"]].set_visible(False)

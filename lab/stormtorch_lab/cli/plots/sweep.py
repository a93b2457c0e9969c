"""Plot of a sweep: time over loss, one panel per rate and round trip."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from stormtorch.telemetry.text import bursts_of, loss_of, network_text
from stormtorch_lab.cli.plots.bench import COLOURS

if TYPE_CHECKING:
    from stormtorch_lab.bench.sweep import SweepPoint, SweepReport

_MARKERS = {"storm": "o", "storm-lossy": "s", "gloo": "v", "gloo-bbr": "^", "gloo-cubic": "D"}


def plot_sweep(report: "SweepReport", path: Path) -> None:
    """Draws into `path`, whose ending chooses the format: a row per round trip, a column per rate."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    rates = sorted({point.requested["rate_bits_per_s"] for point in report.points})
    trips = sorted({point.requested["round_trip_s"] for point in report.points})
    width = max(2.9, 0.55 * len(report.points) / (len(rates) * len(trips)))  # space for the marks of all points
    figure = Figure(figsize=(1.4 + width * len(rates), 1.3 + 2.5 * len(trips)), layout="constrained")
    panels = figure.subplots(len(trips), len(rates), squeeze=False, sharey=True)
    backends: list[str] = report.conditions["backends"]
    for row, trip in zip(panels, trips, strict=True):
        for panel, rate in zip(row, rates, strict=True):
            points = [
                point
                for point in report.points
                if (point.requested["rate_bits_per_s"], point.requested["round_trip_s"]) == (rate, trip)
            ]
            panel.set_visible(bool(points))
            if points:
                _draw(panel, points, backends)
        row[0].set_ylabel("time / ideal")
    in_bursts = any(bursts_of(point.requested) for point in report.points)
    for panel in panels[-1]:
        panel.set_xlabel("packets lost × mean burst" if in_bursts else "packets lost")
    handles: list[Any] = [
        Line2D([], [], color=COLOURS[name], marker=_MARKERS[name], markersize=5, label=name) for name in backends
    ]
    handles.append(Line2D([], [], color="black", linestyle=":", label="ideal"))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 3 * len(rates)), frameon=False)
    figure.suptitle(_title(report), fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _title(report: "SweepReport") -> str:
    title = f"all-reduce over {report.conditions['ranks']} hosts\nmedians, lines up to the worst"
    if any(result.gave_up for point in report.points for result in point.results):
        title += f"; ↑: not done after {report.conditions['patience_s']:g} s"
    return title


def _mark(point: "SweepPoint") -> str:
    loss, bursts = f"{100 * loss_of(point.requested):g} %", bursts_of(point.requested)
    return f"{loss}\n× {bursts}" if bursts else loss


def _draw(panel: Any, points: "list[SweepPoint]", backends: list[str]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

    # Evenly spaced: a logarithmic axis cannot show a network without loss.
    points = sorted(points, key=lambda point: loss_of(point.requested))  # a stable sort: bursts keep their order
    panel.set_yscale("log")
    panel.axhline(1, color="black", linestyle=":", linewidth=1)
    for index, name in enumerate(backends):
        found = [(at, result) for at, point in enumerate(points) for result in point.results if result.backend == name]
        # Shifted a little, so that lines of several backends do not overlap.
        across = [at + 0.06 * (index - (len(backends) - 1) / 2) for at, _ in found]
        colour = COLOURS[name]
        ratios = [result.over_ideal for _, result in found]
        panel.plot(across, ratios, color=colour, marker=_MARKERS[name], markersize=5, linewidth=1.6)
        for x, (_, result) in zip(across, found, strict=True):
            assert result.ideal_s is not None
            worst = result.worst_s / result.ideal_s
            panel.vlines(x, result.median_s / result.ideal_s, worst, color=colour, linewidth=1.2, alpha=0.6)
            if result.gave_up:
                panel.annotate(
                    "↑", (x, worst), (0, 3), textcoords="offset points", ha="center", color=colour, fontsize=13
                )
    panel.set_xticks(range(len(points)), [_mark(point) for point in points])
    panel.set_xlim(-0.4, len(points) - 0.6)
    panel.margins(y=0.12)
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panel.yaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.grid(axis="y", color="#dee2e6", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.set_title(network_text(points[0].requested), fontsize=10)

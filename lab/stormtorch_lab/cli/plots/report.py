"""PNG files of the charts of a report."""

from pathlib import Path
from typing import TYPE_CHECKING

from stormtorch_lab.report.names import file_names
from stormtorch_lab.report.parts import BarChart, LineChart, Page, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {
    "ink": "#16202a",
    "blue": "#0072b2",
    "sky": "#56b4e9",
    "vermilion": "#d55e00",
    "green": "#009e73",
    "orange": "#e69f00",
    "purple": "#cc79a7",
    "yellow": "#b3a700",
    "grey": "#6b7680",
}


def plot_page(page: Page, folder: Path) -> None:
    """Draws every chart of a page into a PNG file of its own; tables are written as CSV only."""
    from stormtorch.cli.plots import check_plot

    check_plot(folder / "picture.png")
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    for name, part in file_names(page):
        if not isinstance(part, LineChart | BarChart | Timeline):
            continue
        high = (
            4.2
            if isinstance(part, LineChart)
            else 1.2 + 0.45 * len(part.table().rows if isinstance(part, BarChart) else part.lanes)
        )
        figure = Figure(figsize=(8.4, high), layout="constrained")
        axis = figure.subplots()
        if isinstance(part, LineChart):
            _draw_lines(axis, part)
        elif isinstance(part, BarChart):
            _draw_bars(axis, part)
        else:
            _draw_lanes(axis, part)
        axis.set_title(part.title, loc="left", fontsize=11)
        axis.spines[["top", "right"]].set_visible(False)
        figure.savefig(folder / f"{name}.png", dpi=150)


def _draw_lines(axis: "Axes", chart: LineChart) -> None:
    for each in chart.series:
        colour = _COLOURS[each.colour]
        style = "--" if each.dashed else "-"
        axis.plot(each.x, each.y, color=colour, linestyle=style, marker="." if len(each.x) <= 60 else "")  # type: ignore[arg-type]  # None is a gap
        if each.low is not None and each.high is not None:
            axis.fill_between(each.x, each.low, each.high, color=colour, alpha=0.16, linewidth=0)
    ends = sorted(
        ((each.y[-1], each) for each in chart.series if each.y and each.y[-1] is not None), key=lambda end: end[0] or 0
    )
    for number, (_, each) in enumerate(reversed(ends)):
        # Labels in a column at the right, in the order of the lines' ends, so that they never overlap.
        axis.annotate(
            each.name,
            (1.01, 0.98 - 0.08 * number),
            xycoords="axes fraction",
            color=_COLOURS[each.colour],
            fontweight="bold",
            va="top",
        )
    for mark in chart.marks:
        colour = _COLOURS[mark.colour]
        if mark.y is not None:
            axis.axhline(mark.y, color=colour, linestyle=":", linewidth=1)
        elif mark.x is not None:
            axis.axvline(mark.x, color=colour, linestyle=":", linewidth=1)
            axis.text(mark.x, 1.0, f" {mark.text}", transform=axis.get_xaxis_transform(), color=colour, va="top")
    axis.set(xlabel=chart.x_label, ylabel=chart.y_label)
    if chart.x_log:
        axis.set_xscale("log")
    if chart.y_log:
        axis.set_yscale("log")


def _draw_bars(axis: "Axes", chart: BarChart) -> None:
    for row, bar in enumerate(chart.bars):
        axis.barh(row, bar.value, color=_COLOURS[bar.colour], alpha=0.35)
        axis.scatter(bar.dots, [row] * len(bar.dots), color=_COLOURS[bar.colour], s=10)
        text = f" > {bar.text}" if bar.at_least else f" {bar.text}"
        axis.text(max(bar.value, 0.0), row, text, va="center", fontweight="bold")
    axis.set_yticks(range(len(chart.bars)), [bar.name for bar in chart.bars])
    axis.invert_yaxis()
    axis.set_xlabel(chart.label)
    for mark in chart.marks:
        if mark.x is not None:
            axis.axvline(mark.x, color=_COLOURS["grey"], linestyle=":", linewidth=1)
            axis.text(mark.x, 0.0, f" {mark.text}", transform=axis.get_xaxis_transform(), fontsize=8, va="bottom")


def _draw_lanes(axis: "Axes", chart: Timeline) -> None:
    for each in chart.events:
        row = chart.lanes.index(each.lane)
        axis.barh(row, max(each.end - each.begin, chart.seconds / 300), left=each.begin, color=_COLOURS[each.colour])
    axis.set_yticks(range(len(chart.lanes)), chart.lanes)
    axis.invert_yaxis()
    axis.set(xlabel="seconds", xlim=(0, chart.seconds))

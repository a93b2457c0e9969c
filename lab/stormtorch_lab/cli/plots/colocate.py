"""Plot of a web service beside a training: speed-up of the service by loss of the training, and latency by rate."""

from pathlib import Path
from typing import TYPE_CHECKING

from stormtorch.telemetry.text import rate_text, time_text
from stormtorch_lab.cli.plots.labels import label_ends

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from stormtorch_lab.bench.services.colocate_results import CaseSummary, ColocateReport

_COLOURS = {
    "model-averaging": "#d9480f",
    "lead": "#c2255c",
    "ddp": "#1971c2",
    "ddp-low": "#74c0fc",
    "none": "#495057",
}
_STYLES = ("-", "--", "-.", ":")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def plot_colocate(report: "ColocateReport", path: Path) -> None:
    """Draws three panels into `path`, whose ending chooses the format."""
    from matplotlib.figure import Figure

    settings = report.conditions["settings"]
    rows = report.rows()
    alone_s = {train: step_s for train, (step_s, _, _) in report.alone().items() if step_s}
    figure = Figure(figsize=(14.5, 4.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    _speedups(left, rows, {id(row): 100 * row.loss for row in rows if row.loss is not None})
    left.set_xlabel("loss of the training, %")
    left.set_title("what loss buys; numbers are shares of a link", fontsize=9, loc="left")
    longer = {id(row): row.step_s / alone_s[row.train] for row in rows if row.step_s and row.train in alone_s}
    _speedups(middle, rows, longer)
    middle.set_xlabel("time of a step, over that of the training alone")
    middle.set_title("what slower steps buy", fontsize=9, loc="left")
    if middle.get_legend_handles_labels()[1]:
        middle.legend(fontsize=7.5, frameon=False)
    _latencies(right, rows, settings["at_latency_s"])
    for axis in (left, middle, right):
        axis.spines[["top", "right"]].set_visible(False)
    where = f"{settings['ranks']} hosts at {rate_text(settings['network']['rate_bits_per_s'])}"
    answer = f"answers of {settings['size'] / 1e3:g} KB, from every host to every host"
    figure.suptitle(f"{headline(rows)}\n{where}; {answer}", fontsize=10.5)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def headline(rows: "list[CaseSummary]") -> str:
    """Title of the plot: the largest speed-up beside a training with loss, and that loss."""
    known = [row for row in rows if row.speedup and row.loss is not None and row.low_share is not None]
    best = max((row for row in known if row.train != "ddp-low"), key=lambda row: row.speedup or 0.0, default=None)
    if best is None or best.speedup is None or best.loss is None:
        return "a web service beside a training"
    return (
        f"beside {best.train} of low priority, which loses {best.loss * 100:.1f} %, the web service is "
        f"up to {best.speedup:.2f} times as fast as beside equal priority"
    )


def _speedups(axis: "Axes", rows: "list[CaseSummary]", price: dict[int, float]) -> None:
    """Plots the speed-up over its cost: a line for each training and rate, along the preferences."""
    curves: dict[tuple[str, float], list[CaseSummary]] = {}
    for row in rows:
        if row.speedup is not None and id(row) in price:
            curves.setdefault((row.train, row.requests), []).append(row)
    rates = sorted({requests for _, requests in curves})
    for (train, requests), points in curves.items():
        place = rates.index(requests)
        x, y = [price[id(row)] for row in points], [row.speedup or 0.0 for row in points]
        axis.plot(
            x,
            y,
            color=_COLOURS[train],
            marker=_MARKERS[place % len(_MARKERS)],
            markersize=5,
            linestyle=_STYLES[place % len(_STYLES)],
            linewidth=1.2,
            label=f"{train}, {requests:g}/s",
        )
        for row, at_x, at_y in zip(points, x, y, strict=True):
            if row.low_share is not None:  # equal is where the speed-up is 1
                axis.annotate(
                    *(row.prefer, (at_x, at_y)),
                    xytext=(4, 4),
                    textcoords="offset points",
                    fontsize=7,
                    color=_COLOURS[train],
                )
    axis.axhline(1.0, color="black", linestyle=":", linewidth=1, label="_")
    axis.set_ylabel("speed-up of the service, by mean latency")


def _latencies(axis: "Axes", rows: "list[CaseSummary]", at_s: float) -> None:
    """Plots mean latency over the rate of requests: a line for each training and preference."""
    curves: dict[tuple[str, str], list[CaseSummary]] = {}
    for row in rows:
        if row.mean_s is not None:
            curves.setdefault((row.train, row.prefer), []).append(row)
    shares = list(dict.fromkeys(prefer for _, prefer in curves))
    for (train, prefer), points in curves.items():
        place = shares.index(prefer)
        axis.plot(
            [row.requests for row in points],
            [1e3 * (row.mean_s or 0.0) for row in points],
            color=_COLOURS[train],
            alpha=1.0 - 0.6 * place / max(len(shares), 1),
            linestyle=_STYLES[place % len(_STYLES)],
            marker=_MARKERS[place % len(_MARKERS)],
            markersize=4,
            label=train if train == "none" else f"{train}, {prefer}",
        )
    axis.set_xlabel("requests per second, all hosts")
    axis.set_ylabel("mean latency of the service, ms")
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
    axis.axhline(1e3 * at_s, color="black", linestyle=":", linewidth=1, label="_")
    axis.annotate(f"{time_text(at_s)}", (0.01, 1e3 * at_s), xycoords=("axes fraction", "data"), fontsize=8, va="bottom")
    axis.set_title("latency by rate", fontsize=9, loc="left")
    label_ends(axis, fontsize=7.5)

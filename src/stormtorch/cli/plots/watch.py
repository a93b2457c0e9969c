"""Plot of `stormtorch watch`: the verdict, the links, the breakdown of steps, and four measures over time."""

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BLUE, _ORANGE, _RED, _VIOLET, _GREEN = "#0072B2", "#E69F00", "#D55E00", "#CC79A7", "#009E73"
_LEVELS = {"bad": _RED, "warn": "#a86700", "good": "#00795a", "idle": "#566270"}
_MOST_BARS = 24
_MOST_NUMBERS = 12


def plot_watch(data: dict[str, Any], path: Path) -> None:
    """Draws a snapshot into `path`; its suffix is the format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 9), layout="constrained")
    grid = figure.subplots(3, 2, gridspec_kw={"height_ratios": (1.35, 1, 1)})
    first = data["verdict"][0]
    remedy = f"\n{textwrap.fill(first['remedy'], 120)}" if first["remedy"] else ""
    title = _plain(f"{textwrap.fill(first['text'], 100)}{remedy}")
    figure.suptitle(title, fontsize=13, color=_LEVELS[first["level"]], ha="left", x=0.02)
    _matrix(grid[0, 0], data)
    _split(grid[0, 1], data)
    columns = data["series"]["columns"]
    _over_time(grid[1, 0], columns, "time of a step, s", [("step", _BLUE, "step"), ("wait", _RED, "waiting")])
    lost = [("worst_loss_high", _RED, "worst link"), ("link_loss", _BLUE, "mean"), ("lost", _GREEN, "after repair")]
    _over_time(grid[1, 1], columns, "lost, %", lost, scale=100)
    _over_time(grid[2, 0], columns, "drift between replicas", [("drift", _BLUE, "drift"), ("bound", _RED, "bound")])
    has_loss = any(value is not None for value in columns.get("train_loss", []))
    last = [("train_loss", _BLUE, "loss of the training")] if has_loss else [("sent", _BLUE, "sent by a rank")]
    _over_time(
        grid[2, 1], columns, "loss of the training" if has_loss else "sent, MB/s", last, scale=1 if has_loss else 1e-6
    )
    figure.savefig(path, dpi=130)


def _plain(text: str) -> str:
    """Escapes dollars, which would begin a formula."""
    return text.replace("$", r"\$")


def _matrix(axis: "Axes", data: dict[str, Any]) -> None:
    matrix = data["matrix"]
    axis.set_title("loss of links, % (rows receive, columns send)", fontsize=10, loc="left")
    if matrix is None or len(matrix["ranks"]) < 2:
        axis.axis("off")
        return
    values = [[float("nan") if value is None else 100 * value for value in row] for row in matrix["loss"]]
    known = [value for row in values for value in row if value == value]
    # Use half of the colour range: numbers must stay readable in the darkest cell.
    axis.imshow(values, cmap="Oranges", vmin=0, vmax=2 * max([5.0, *known]), aspect="auto")
    axis.spines[:].set_visible(False)
    ranks = matrix["ranks"]
    if len(ranks) <= _MOST_NUMBERS:
        axis.set_xticks(range(len(ranks)), ranks)
        axis.set_yticks(range(len(ranks)), ranks)
        for row, cells in enumerate(values):
            for column, value in enumerate(cells):
                if value == value:
                    shown = f"{value:.0f}" if value >= 9.95 or value < 0.05 else f"{value:.1f}"
                    axis.text(column, row, shown, ha="center", va="center", fontsize=8)


def _split(axis: "Axes", data: dict[str, Any]) -> None:
    known = sorted((each for each in data["ranks"] if each["split"]), key=lambda each: -each["split"][0])[:_MOST_BARS]
    known.sort(key=lambda each: -each["rank"])
    axis.set_title("where a step goes, s", fontsize=10, loc="left")
    start = [0.0] * len(known)
    names = ("computes", "waits for the slowest rank", "waits for the network", "waits for views")
    for part, (name, colour) in enumerate(zip(names, (_BLUE, _ORANGE, _RED, _VIOLET), strict=True)):
        lengths = [each["split"][part] for each in known]
        if part == 0 or any(lengths):
            axis.barh([str(each["rank"]) for each in known], lengths, left=start, color=colour, label=name)
        start = [a + b for a, b in zip(start, lengths, strict=True)]
    if known:
        axis.legend(fontsize=8, loc="lower left", bbox_to_anchor=(0.0, -0.32), ncols=4, frameon=False)
    axis.spines[["top", "right"]].set_visible(False)


def _over_time(
    axis: "Axes",
    columns: dict[str, list[float | None]],
    title: str,
    lines: list[tuple[str, str, str]],
    scale: float = 1.0,
) -> None:
    axis.set_title(title, fontsize=10, loc="left")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(color="#e9ecef", linewidth=0.7)
    for name, colour, words in lines:
        if not any(value is not None for value in columns.get(name, [])):
            continue
        begin = columns["time"][0] or 0.0
        places = [place for place, value in enumerate(columns[name]) if value is not None]
        seconds = [(columns["time"][place] or 0.0) - begin for place in places]
        mean = [scale * (columns[name][place] or 0.0) for place in places]
        axis.plot(seconds, mean, color=colour, label=words)
        if len(lines) < 3 and f"{name}_low" in columns:  # bands of three lines would hide each other
            low, high = ([scale * (columns[name + end][place] or 0.0) for place in places] for end in ("_low", "_high"))
            axis.fill_between(seconds, low, high, color=colour, alpha=0.18, linewidth=0)
    axis.set_xlabel("seconds", fontsize=9)
    if lines[0][0] != "train_loss":
        axis.set_ylim(bottom=0)
    if len(axis.get_legend_handles_labels()[0]) > 1:
        axis.legend(fontsize=8, frameon=False)

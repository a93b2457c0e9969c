"""Plot of `stormtorch ledger`: chunks that arrived, waiting times, and drift between replicas."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stormtorch.telemetry.statistics import mean

if TYPE_CHECKING:
    from stormtorch.telemetry.histories import RankHistory

# Okabe-Ito: colours that colour-blind people can distinguish.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7", "#F0E442", "#000000")
_WAITS = (("gradient_wait_s", "gradients", "#0072B2"), ("broadcast_wait_s", "parameters", "#E69F00"))
# With more ranks than this, all are drawn in grey and only the worst one in colour.
_MOST_LINES = 8
_MOST_POINTS = 400


def plot_histories(histories: "Sequence[RankHistory]", path: Path) -> None:
    """Draws the histories into `path`; its suffix is the format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 8.0), layout="constrained")
    arrived, waits, drift = figure.subplots(3, 1, sharex=True)
    _draw_arrived(histories, arrived)
    _draw_waits(histories, waits)
    _draw_drift(histories, drift)
    drift.set_xlabel("step")
    for axis in (arrived, waits, drift):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.2)
    figure.align_ylabels()
    figure.savefig(path, dpi=110)


def _draw_arrived(histories: "Sequence[RankHistory]", axis: Any) -> None:
    axis.set(title="chunks that arrived", ylabel="%")
    worst = min(histories, key=lambda each: each.arrived)
    shown = histories if len(histories) <= _MOST_LINES else [worst]
    if shown != histories:
        for history in histories:
            axis.plot(*_series(history, "arrived", 100.0), color="#999999", linewidth=0.5, alpha=0.4)
    for number, history in enumerate(shown):
        colour = COLOURS[number % len(COLOURS)]
        label = history.name + (", the worst" if history is worst and len(histories) > 1 else "")
        axis.plot(*_series(history, "arrived", 100.0), color=colour, linewidth=1.2, label=label)
    axis.legend(frameon=False, fontsize=8, ncols=2)


def _draw_waits(histories: "Sequence[RankHistory]", axis: Any) -> None:
    """Draws the waits per step of the rank that waited longest."""
    history = max(histories, key=lambda each: each.waited_s)
    layers, steps = [], list[float]()
    for name, _, _ in _WAITS:
        found = [(entry["step"], 1e3 * entry.get(name, 0.0) / entry["steps"]) for entry in history.entries]
        steps, values = _thinned(found)
        layers.append(values)
    axis.stackplot(steps, *layers, labels=[label for _, label, _ in _WAITS], colors=[colour for _, _, colour in _WAITS])
    who = f" of {history.name}, which waited longest" if len(histories) > 1 else ""
    axis.set(title=f"waiting{who}", ylabel="ms a step")
    axis.set_ylim(0, 1.3 * max((sum(each) for each in zip(*layers, strict=True)), default=0.0) or 1.0)
    axis.legend(frameon=False, fontsize=8, ncols=2, loc="upper right")


def _draw_drift(histories: "Sequence[RankHistory]", axis: Any) -> None:
    axis.set(title="drift of replicas, and its bound", ylabel="mean square")
    # Policies that do not measure drift leave the axis empty, with a text that says so.
    drawn = False
    for name, label, colour in (("pair_drift", "drift", "#0072B2"), ("pair_bound", "bound", "#D55E00")):
        history = max(histories, key=lambda each: len(_series(each, "pair_drift", 1.0)[0]))
        steps, values = _series(history, name, 1.0)
        if any(value > 0 for value in values):
            axis.semilogy(steps, values, color=colour, linewidth=1.2, label=f"{label}, {history.name}")
            drawn = True
    if drawn:
        axis.legend(frameon=False, fontsize=8, ncols=2)
    else:
        axis.text(0.5, 0.5, "not measured", transform=axis.transAxes, ha="center", va="center", color="#777777")


def _series(history: "RankHistory", name: str, scale: float) -> tuple[list[float], list[float]]:
    return _thinned([(each["step"], scale * each[name]) for each in history.entries if each.get(name) is not None])


def _thinned(points: list[tuple[int, float]]) -> tuple[list[float], list[float]]:
    """Averages neighbouring points if there are more than a plot can show."""
    size = max(-(-len(points) // _MOST_POINTS), 1)
    blocks = [points[first : first + size] for first in range(0, len(points), size)]
    return [mean([step for step, _ in each]) for each in blocks], [
        mean([value for _, value in each]) for each in blocks
    ]

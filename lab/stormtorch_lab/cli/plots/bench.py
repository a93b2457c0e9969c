"""Plots of benchmarks against gloo: a dot for every round, a line for every median."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stormtorch_lab.bench.ddp import DdpReport
    from stormtorch_lab.bench.results import AllReduceReport, BackendResult

COLOURS = {
    "storm": "#d9480f",
    "storm-flat": "#868e96",
    "storm-one-lane": "#adb5bd",
    "storm-lossy": "#f59f00",
    "storm-lossy-bf16": "#82c91e",
    "storm-lossy-fp16": "#40c057",
    "storm-lossy-int8": "#12b886",
    "storm-lossy-int4": "#099268",
    "storm-drift": "#c2255c",
    "storm-drift-bf16": "#e64980",
    "storm-drift-fp16": "#be4bdb",
    "storm-drift-int8": "#f783ac",
    "storm-drift-int4": "#faa2c1",
    "mpi": "#0b7285",
    "gloo": "#495057",
    "gloo-bbr": "#1c7ed6",
    "gloo-cubic": "#5f3dc4",
}
"""Colours of the backends, in all plots."""


def plot_allreduce(report: "AllReduceReport", path: Path) -> None:
    """Draws one panel per size into `path`; its ending chooses the format."""
    conditions = report.conditions
    panels = []
    for mb in conditions["mb"]:
        results = [result for result in report.results if result.mb == mb]
        ideal_s = next((result.ideal_s for result in results), None)
        panels.append(_Panel(f"{mb:g} MB", results, {} if ideal_s is None else {"ideal": ideal_s}))
    title = f"all-reduce, {conditions['ranks']} ranks, {_where(conditions)}, {conditions['dtype']}"
    _draw(panels, conditions, title, path)


def plot_ddp(report: "DdpReport", path: Path) -> None:
    """Draws the steps of all backends into `path`; its ending chooses the format."""
    conditions = report.conditions
    floors = {"no_sync": conditions["no_sync_s"], "line": conditions["line_s"]}
    panel = _Panel("", report.results, {name: floor for name, floor in floors.items() if floor is not None})
    title = (
        f"a step of {conditions['params'] / 1e6:.3g} M parameters\n{conditions['ranks']} ranks, {_where(conditions)}"
    )
    _draw([panel], conditions, title, path)


@dataclass(frozen=True)
class _Panel:
    title: str
    results: "Sequence[BackendResult]"
    floors_s: dict[str, float]
    """Lower bounds of the time, by name."""


def _draw(panels: list[_Panel], conditions: dict[str, Any], title: str, path: Path) -> None:
    from matplotlib.figure import Figure

    backends: list[str] = conditions["backends"]
    figure = Figure(figsize=(2.4 + 0.8 * len(panels) * (1 + len(backends)), 4.2), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, panel in zip(axes, panels, strict=True):
        for result in panel.results:
            position = backends.index(result.backend)
            times_ms = [1e3 * seconds for seconds in result.times_s]
            colour = COLOURS[result.backend]
            # Rounds from left to right, so that drift and spikes show.
            across = [position - 0.3 + 0.6 * (i + 0.5) / len(times_ms) for i in range(len(times_ms))]
            axis.bar(position, 1e3 * result.median_s, width=0.7, color=colour, alpha=0.25)
            axis.scatter(across, times_ms, s=10, color=colour, linewidths=0)
            axis.hlines(1e3 * result.median_s, position - 0.35, position + 0.35, color=colour, linewidth=2)
            if result.gave_up:
                axis.annotate("not done", (across[-1], times_ms[-1]), fontsize=8, ha="right", va="bottom")
        for name, floor_s in panel.floors_s.items():
            axis.axhline(1e3 * floor_s, color="black", linestyle=":", linewidth=1)
            axis.text(len(backends) - 0.5, 1e3 * floor_s, name, ha="right", va="bottom", fontsize=8)
        axis.set_xlim(-0.5, len(backends) - 0.5)
        axis.set_xticks(range(len(backends)), [name.replace("-", "\n") for name in backends])
        axis.set_ylim(bottom=0)
        axis.set_title(panel.title)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("slowest rank of a round, ms (bar: median)")
    figure.suptitle(title + _loss_line(conditions), fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _where(conditions: dict[str, Any]) -> str:
    from stormtorch.telemetry.text import network_text

    return network_text(conditions["requested"]) if "requested" in conditions else "loopback"


def _loss_line(conditions: dict[str, Any]) -> str:
    lost = conditions.get("loss_measured")
    if not lost:
        return ""
    whose = "all backends' packets" if "requested" in conditions else "the storm backends' datagrams"
    return f"\n{100 * lost:.1f} % of {whose} lost" + ("" if "requested" in conditions else ", none of gloo's")

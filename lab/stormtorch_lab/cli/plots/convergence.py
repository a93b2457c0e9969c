"""Plot of convergence: validation loss over the seconds of training."""

from pathlib import Path
from typing import TYPE_CHECKING

from stormtorch.telemetry.text import condition_text
from stormtorch_lab.cli.plots.bench import COLOURS
from stormtorch_lab.cli.plots.labels import label_ends

if TYPE_CHECKING:
    from stormtorch_lab.bench.convergence import ConvergenceReport, Curve


# Colours of policies, in order of first use.
_FURTHER = ("#2b8a3e", "#e67700", "#0c8599", "#9c36b5", "#a61e4d", "#5c940d")


def plot_convergence(report: "ConvergenceReport", path: Path) -> None:
    """Draws a line per backend into `path`, whose ending chooses the format."""
    from matplotlib.figure import Figure

    conditions = report.conditions
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axis = figure.subplots()
    for curve in report.curves:
        colour = _colour(report, curve.backend)
        label = "_" if curve.gave_up else curve.backend
        axis.plot(curve.clock_s, curve.losses, color=colour, marker=".", label=label)
        if curve.gave_up:
            waited_s = [curve.clock_s[-1], _waited_until_s(report, curve)]
            axis.plot(waited_s, [curve.losses[-1]] * 2, color=colour, linestyle="--", label=_given_up(report, curve))
    axis.set_xlabel("seconds of training")
    axis.set_ylabel("validation loss, nats per byte")
    axis.set_xlim(left=0)
    bottom, top = axis.get_ylim()
    axis.set_ylim(bottom, top)  # fixed before the labels are placed
    if report.target is not None:
        axis.axhline(report.target, color="black", linestyle=":", linewidth=1, label="_")
    crowded, before_s = 0, -1e9
    for reached_s, backend in _reached(report):
        assert report.target is not None
        colour = _colour(report, backend)
        axis.plot([reached_s] * 2, [bottom, report.target], color=colour, linestyle=":", linewidth=1, label="_")
        # Times close together are written above each other.
        crowded = crowded + 1 if reached_s - before_s < 0.09 * axis.get_xlim()[1] else 0
        before_s = reached_s
        axis.annotate(
            _seconds(reached_s),
            (reached_s, bottom),
            xytext=(-3, 3 + 10 * crowded),
            textcoords="offset points",
            ha="right",
            color=colour,
            fontsize=8.5,
        )
    label_ends(axis)
    axis.spines[["top", "right"]].set_visible(False)
    where = condition_text(conditions["requested"]) if "requested" in conditions else "loopback"
    figure.suptitle(f"{headline(report)}\n{conditions['ranks']} ranks, {where}", fontsize=10.5)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _colour(report: "ConvergenceReport", backend: str) -> str:
    """Colour of a backend; a policy without its own colour takes the next one."""
    policies = [curve.backend for curve in report.curves if curve.backend not in COLOURS]
    return COLOURS.get(backend) or _FURTHER[policies.index(backend) % len(_FURTHER)]


def headline(report: "ConvergenceReport") -> str:
    """Title of the plot: which backend reaches the target loss first, and which last."""
    reached = _reached(report)
    if not reached:
        given_up = all(curve.gave_up for curve in report.curves) or report.target is None
        return "every backend was aborted" if given_up else f"no backend reaches a loss of {report.target:.2f}"
    (first_s, first), (last_s, last) = reached[0], reached[-1]
    said = f"{first} reaches a loss of {report.target:.2f} in {_seconds(first_s)}"
    return said if first == last else f"{said}, {last} in {_seconds(last_s)}"


def _reached(report: "ConvergenceReport") -> list[tuple[float, str]]:
    """Seconds until each backend reached the target, and its name; the soonest first."""
    times = [(report.reached_s(curve), curve.backend) for curve in report.curves]
    return sorted((each_s, backend) for each_s, backend in times if each_s is not None)


def _waited_until_s(report: "ConvergenceReport", curve: "Curve") -> float:
    """Label and end of the line of an aborted backend: at its wait limit, or at the others' last evaluation."""
    until_s = curve.clock_s[-1] + report.conditions["patience_s"]
    others_s = max((each.clock_s[-1] for each in report.curves), default=0.0)
    return float(min(until_s, others_s) if others_s > curve.clock_s[-1] else until_s)


def _given_up(report: "ConvergenceReport", curve: "Curve") -> str:
    patience_s = report.conditions["patience_s"]
    if curve.steps[-1] == 0:
        return f"{curve.backend}: no step\nin {patience_s:g} s"
    return f"{curve.backend}: aborted\nafter {patience_s:g} s more"


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 10 else f"{value:.2g} s"

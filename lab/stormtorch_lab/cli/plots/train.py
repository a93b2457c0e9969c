"""Plots of trainings: validation loss over steps and over seconds, a colour for each policy."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stormtorch.telemetry.statistics import mean
from stormtorch_lab.cli.plots.labels import label_ends
from stormtorch_lab.cli.tables.train import where_text
from stormtorch_lab.studies.results import TrainReport, TrainResult

COLOURS = {
    "lossless": "#495057",
    "plain": "#f59f00",
    "lead": "#d9480f",
    "model-averaging": "#1c7ed6",
    "gradient-averaging": "#5f3dc4",
}
"""Colours of the policies, in all plots."""
# Colours of policies in files, in the order in which they were named.
_FURTHER = ("#2b8a3e", "#c2255c", "#0b7285", "#846358", "#fab005")


def colours_of(labels: Sequence[str]) -> dict[str, str]:
    """Chooses a colour for each policy: presets have fixed ones."""
    others = (label for label in labels if label not in COLOURS)
    return COLOURS | dict(zip(others, itertools.cycle(_FURTHER), strict=False))


def plot_training(report: TrainReport, path: Path) -> None:
    """Draws validation curves and their differences into `path`; its ending is the format. Seeds become a band."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.4), layout="constrained")
    by_step, against, by_second = figure.subplots(1, 3)
    colours = colours_of(report.settings.labels)
    draw_validation(report.results, colours, by_step, against)
    for label in report.settings.labels:
        curves = [result.val_curve for result in report.of(label)]
        seconds = [mean([second for _, second, _ in column]) for column in zip(*curves, strict=False)]
        _draw_band(by_second, seconds, [[loss for _, _, loss in curve] for curve in curves], colours[label], label)
    by_second.set(xlabel="seconds of training", ylabel="validation loss")
    by_second.spines[["top", "right"]].set_visible(False)
    label_ends(by_second)
    data, settings = report.requested["data"]["name"], report.settings
    figure.suptitle(
        f"{report.requested['params'] / 1e6:.2g} M parameters, {data}, {settings.ranks} ranks, {where_text(report)}\n"
        f"{100 * report.measured['loss']:.1f} % lost, measured",
        fontsize=11,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def draw_validation(results: Sequence[TrainResult], colours: dict[str, str], by_step: Any, against: Any) -> None:
    """Draws validation loss into one panel, and its difference to lossless of the same seed into another."""
    lossless = {result.seed: result for result in results if result.policy == "lossless"}
    for policy in dict.fromkeys(result.policy for result in results):
        own = [result for result in results if result.policy == policy]
        steps = [float(step) for step, _, _ in own[0].val_curve]
        _draw_band(
            by_step, steps, [[loss for _, _, loss in result.val_curve] for result in own], colours[policy], policy
        )
        paired = [result for result in own if result.seed in lossless]
        if paired:
            more = [
                [above for _, above in _difference(result.val_curve, lossless[result.seed].val_curve)]
                for result in paired
            ]
            _draw_band(against, steps, more, colours[policy], policy)
    by_step.set(xlabel="step", ylabel="validation loss")
    against.set(xlabel="step", ylabel="validation loss above lossless, same seed")
    for axis in (by_step, against):
        axis.spines[["top", "right"]].set_visible(False)
    label_ends(by_step)
    if lossless:
        label_ends(against)
    else:
        against.set_axis_off()
        against.text(0.5, 0.5, "lossless was not trained", ha="center", va="center", transform=against.transAxes)


def _draw_band(axis: Any, x: Sequence[float], curves: Sequence[Sequence[float]], colour: str, label: str) -> None:
    """Draws the mean over seeds as a line, and their range as a band."""
    columns = list(zip(*curves, strict=False))
    x = x[: len(columns)]
    axis.plot(x, [mean(column) for column in columns], color=colour, marker=".", linewidth=1.2, label=label)
    if len(curves) > 1:
        low, high = [min(column) for column in columns], [max(column) for column in columns]
        axis.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)


def _difference(
    curve: list[tuple[int, float, float]], other: list[tuple[int, float, float]]
) -> list[tuple[int, float]]:
    """Differences between policies, which the steep curves themselves do not show."""
    return [(step, loss - base) for (step, _, loss), (_, _, base) in zip(curve, other, strict=True)]

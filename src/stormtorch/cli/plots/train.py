"""Pictures of trainings: how the loss falls by steps and by seconds, a colour for each policy."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stormtorch.cli.tables.train import where_text
from stormtorch.studies.results import TrainReport, TrainResult

COLOURS = {
    "lossless": "#495057",
    "plain": "#f59f00",
    "lead": "#d9480f",
    "model-averaging": "#1c7ed6",
    "gradient-averaging": "#5f3dc4",
}
"""Colours of the policies, in all pictures."""
# Colours of policies in files, in the order in which they were named.
_FURTHER = ("#2b8a3e", "#c2255c", "#0b7285", "#846358", "#fab005")


def colours_of(labels: Sequence[str]) -> dict[str, str]:
    """Chooses a colour for each policy: presets have one of their own."""
    others = (label for label in labels if label not in COLOURS)
    return COLOURS | dict(zip(others, itertools.cycle(_FURTHER), strict=False))


def plot_training(report: TrainReport, path: Path) -> None:
    """Draws validation curves and what they differ by into `path`; its ending is the format. Seeds share a colour."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), layout="constrained")
    by_step, against, by_second = figure.subplots(1, 3)
    colours = colours_of(report.settings.labels)
    draw_validation(report.results, colours, by_step, against)
    for result in report.results:
        _, seconds, val_losses = zip(*result.val_curve, strict=True)
        by_second.plot(seconds, val_losses, color=colours[result.policy], marker=".", linewidth=1)
    by_second.set(xlabel="seconds of training", ylabel="validation loss")
    by_second.spines[["top", "right"]].set_visible(False)
    data, settings = report.asked["data"]["name"], report.settings
    figure.suptitle(
        f"{report.asked['params'] / 1e6:.2g} M parameters, {data}, {settings.ranks} ranks, {where_text(report)}\n"
        f"{100 * report.measured['loss']:.1f} % lost, measured",
        fontsize=11,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def draw_validation(results: Sequence[TrainResult], colours: dict[str, str], by_step: Any, against: Any) -> None:
    """Draws validation loss into one panel, and how much it is above lossless of the same seed into another."""
    lossless = {result.seed: result for result in results if result.policy == "lossless"}
    for result in results:
        colour = colours[result.policy]
        label = result.policy if result.seed == results[0].seed else None
        if result.seed in lossless:
            steps, more = zip(*_difference(result.val_curve, lossless[result.seed].val_curve), strict=True)
            against.plot(steps, more, color=colour, marker=".", linewidth=1)
        validated, _, val_losses = zip(*result.val_curve, strict=True)
        by_step.plot(validated, val_losses, color=colour, marker=".", linewidth=1, label=label)
    by_step.set(xlabel="step", ylabel="validation loss")
    against.set(xlabel="step", ylabel="validation loss above lossless, same seed")
    for axis in (by_step, against):
        axis.spines[["top", "right"]].set_visible(False)
    by_step.legend(frameon=False)
    if not lossless:
        against.set_axis_off()
        against.text(0.5, 0.5, "lossless was not trained", ha="center", va="center", transform=against.transAxes)


def _difference(
    curve: list[tuple[int, float, float]], other: list[tuple[int, float, float]]
) -> list[tuple[int, float]]:
    """Differences between policies, which the curves themselves are too steep to show."""
    return [(step, loss - base) for (step, _, loss), (_, _, base) in zip(curve, other, strict=True)]

"""Pictures of trainings: how the loss falls by steps and by seconds, a colour for each policy."""

from pathlib import Path

from stormtorch.training.display import where_text
from stormtorch.training.results import TrainReport

COLOURS = {
    "lossless": "#495057",
    "plain": "#f59f00",
    "lead": "#d9480f",
    "model-averaging": "#1c7ed6",
    "gradient-averaging": "#5f3dc4",
}
"""Of the policies, in all pictures."""


def plot_training(report: TrainReport, path: Path) -> None:
    """Draws training and validation curves into `path`; its ending chooses the format. Seeds share a colour."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), layout="constrained")
    training, by_step, by_second = figure.subplots(1, 3)
    for result in report.results:
        colour = COLOURS[result.policy]
        label = result.policy if result.seed == 0 else None
        steps, losses = zip(*_smoothed(result.curve), strict=True)
        training.plot(steps, losses, color=colour, linewidth=1, label=label)
        validated, seconds, val_losses = zip(*result.val_curve, strict=True)
        by_step.plot(validated, val_losses, color=colour, marker=".", linewidth=1, label=label)
        by_second.plot(seconds, val_losses, color=colour, marker=".", linewidth=1, label=label)
    training.set(xlabel="step", ylabel="training loss, mean of a twentieth of the steps")
    by_step.set(xlabel="step", ylabel="validation loss")
    by_second.set(xlabel="seconds of training", ylabel="validation loss")
    for axis in (training, by_step, by_second):
        axis.spines[["top", "right"]].set_visible(False)
    training.legend(frameon=False)
    data, settings = report.asked["data"]["name"], report.settings
    figure.suptitle(
        f"{report.asked['params'] / 1e6:.2g} M parameters, {data}, {settings.ranks} ranks, {where_text(report)}\n"
        f"{100 * report.measured['loss']:.1f} % lost, measured",
        fontsize=11,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _smoothed(curve: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Means over so many steps that their noise does not hide what policies differ by."""
    width = max(len(curve) // 20, 1)
    parts = [curve[first : first + width] for first in range(0, len(curve), width)]
    return [(part[-1][0], sum(loss for _, loss in part) / len(part)) for part in parts]

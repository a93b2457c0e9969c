"""RPS: does averaging models survive loss, where averaging gradients does not?

16 workers, arrival of 100, 99, 95 and 90 %: ResNet-20 and ResNet-110 on CIFAR-10, a one-layer LSTM on ATIS. What counts
is the training loss, as in the publication (Yu et al., ICML 2019).
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from grid import GPU, Run, main
from over_seeds import explain, mean_text, seeds

from stormtorch_lab.studies.settings import SimSettings

LOSSES = (0.0, 0.01, 0.05, 0.1)
MODELS = ("resnet20", "resnet110", "lstm")
# 39 steps are an epoch of 20,000 pictures: 80 of them, and 40.
STEPS = {"resnet20": 3120, "resnet110": 1560, "lstm": 875}
SEEDS = {"resnet20": 3, "resnet110": 1, "lstm": 3}
POLICIES = ("model-averaging", "gradient-averaging")


def settings_of(chosen: argparse.Namespace, model: str, **other: Any) -> SimSettings:
    """ResNets on the device, the LSTM on the CPU: it is small, and its sentences differ in length."""
    data = {"resnet20": "cifar10.pack", "resnet110": "cifar10.pack", "lstm": "atis"}[model]
    options: dict[str, Any] = {"model": model, "data": chosen.data / data, "workers": 16, "steps": STEPS[model]}
    if model == "lstm":
        options |= {"device": "cpu"}
    else:
        options |= {"device": chosen.device, "batch": 32}
        if chosen.device == "cuda":
            options |= GPU | {"precision": "tf32"}
    return SimSettings(**(options | other))


def runs(chosen: argparse.Namespace) -> list[Run]:
    """The most telling first."""
    found = []
    for loss in (0.0, 0.1, 0.01, 0.05):
        for policy in POLICIES:
            for model in MODELS:
                if policy == "gradient-averaging" and model != "lstm" and loss != 0.01:
                    continue  # without loss, SGD makes both the same, unlike Adam; and 1 % tells enough of the others
                for seed in range(SEEDS[model]):
                    settings = settings_of(chosen, model, policies=(policy,), loss=loss, first_seed=seed)
                    found.append(Run(key=f"{model}/{policy}/{loss:g}/{seed}", settings=settings))
    return sorted(found, key=lambda run: MODELS.index(run.settings.model))


TITLES = {"resnet20": "ResNet-20, CIFAR-10", "resnet110": "ResNet-110, CIFAR-10", "lstm": "LSTM, ATIS"}


def table(found: dict[str, dict[str, Any]]) -> list[str]:
    """Rows of the page's table: training loss in the end, and what it is above that without loss."""
    rows = []
    for model in MODELS:
        for policy in POLICIES:
            # Without loss, plain gradient descent makes both the same, and it was run once.
            bare = f"{model}/{policy if model == 'lstm' else 'model-averaging'}/0"
            base = {run["seed"]: run["loss"] for run in seeds(found, bare)}
            cells = [mean_text(list(base.values()), ".4f")]
            for loss in LOSSES[1:]:
                runs = seeds(found, f"{model}/{policy}/{loss:g}")
                more = [run["loss"] - base[run["seed"]] for run in runs if run["seed"] in base]
                above = f" ({mean_text(more, '+.4f')})" if more else ""
                cells.append(mean_text([run["loss"] for run in runs], ".4f") + above)
            label = f"{TITLES[model].partition(',')[0]}, {policy.split('-')[0]}s averaged"
            rows.append(f"| {label} ({SEEDS[model]}) | {' | '.join(cells)} |")
    return rows


def draw(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Training loss by step: models above, gradients below."""
    from matplotlib.figure import Figure

    print("\n".join(table(found)))
    shades = {0.0: "#212529", 0.01: "#f59f00", 0.05: "#e8590c", 0.1: "#c2255c"}
    widths = {0.0: 3.0, 0.01: 2.2, 0.05: 1.5, 0.1: 0.8}  # they may lie upon each other
    models = [model for model in MODELS if seeds(found, f"{model}/model-averaging/0")]
    figure = Figure(figsize=(4.4 * max(len(models), 1), 7), layout="constrained")
    axes = figure.subplots(2, max(len(models), 1), sharex="col", sharey="col", squeeze=False)
    for column, model in enumerate(models):
        for row, policy in enumerate(POLICIES):
            axis = axes[row, column]
            # The LSTM learns by Adam, under which the mean of models is another thing than that of gradients.
            without = f"{model}/{policy if model == 'lstm' else 'model-averaging'}/0"
            base = [run["loss"] for run in seeds(found, without)]
            for loss in LOSSES:
                prefix = without if loss == 0.0 else f"{model}/{policy}/{loss:g}"
                results = seeds(found, prefix)
                for number, run in enumerate(results):
                    steps, values = zip(*_smooth(run["curve"]), strict=True)
                    label = f"{100 - 100 * loss:g} % arrive" if number == 0 else None
                    axis.plot(steps, values, color=shades[loss], linewidth=widths[loss], label=label)
                if results and base:
                    ends = [run["loss"] for run in results]
                    drifts = [run["drift"] for run in results]
                    held = [run["val_loss"] for run in results]
                    rights = [run["accuracy"] for run in results]
                    print(
                        f"{prefix}: training loss {mean_text(ends, '.4f')}, "
                        f"{statistics.fmean(ends) - statistics.fmean(base):+.4f}; held out {mean_text(held, '.4f')}, "
                        f"right {mean_text(rights, '.4f')}, drift {statistics.fmean(drifts):.2e}"
                    )
            axis.set_yscale("log")
            axis.spines[["top", "right"]].set_visible(False)
            explain(axis, fontsize=8)
            axis.set_title(f"{TITLES[model]}: {policy.replace('-', ' ')}", fontsize=10)
            if row == 1:
                axis.set_xlabel("step")
            if column == 0:
                axis.set_ylabel("training loss, mean of 16 workers")
    figure.savefig(path, dpi=150)


def _smooth(curve: list[list[float]], window: int = 5) -> list[tuple[float, float]]:
    """Means over a few points, as single batches are noisy."""
    losses = [loss for _, loss in curve]
    return [(step, statistics.fmean(losses[max(at - window + 1, 0) : at + 1])) for at, (step, _) in enumerate(curve)]


if __name__ == "__main__":
    main("averaging", __doc__, runs, draw)

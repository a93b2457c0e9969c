"""Networks that are not of independent loss: bursts, recorded Wi-Fi links, a bad rack, shared loss, stragglers; and one
bad sender that has data which nobody else has, where the mean of what arrived is biased and Horvitz-Thompson is not.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from grid import Run, main
from over_seeds import above, mean_text, seeds
from small import small
from torch import nn

from stormtorch.network.loss import Bernoulli, GilbertElliott, PerLink, Shared, Stragglers
from stormtorch.telemetry.statistics import mean
from stormtorch_lab.cli.plots.train import COLOURS
from stormtorch_lab.studies.settings import SimSettings
from stormtorch_lab.tasks.data.batches import Batch
from stormtorch_lab.tasks.kinds import open_task
from stormtorch_lab.tasks.task import Task

SEEDS = 3
# One of eight workers has other data, and its gradients are lost like this.
SENDERS = 8
RARE_LOSS = 0.6


class Uneven(Task):
    """The first worker learns Shakespeare, all others learn WikiText-2."""

    language = True

    def __init__(self, settings: SimSettings) -> None:
        device = torch.device(settings.device)
        assert settings.data is not None
        # A text that is the same everywhere: Python's own source, which is at hand, changes with every version.
        self._common, self._rare = (
            open_task("llama", text, batch=settings.batch, device=device, held_out=settings.held_out)
            for text in (settings.data, settings.data.parent / "shakespeare.txt")
        )
        super().__init__("llama", batch=settings.batch or 8, lr=self._common.lr, device=device)

    def model(self, seed: int) -> nn.Module:
        """See `Task`."""
        return self._common.model(seed)

    def batches(self, seed: int, step: int, workers: int, first: int, last: int) -> Batch:
        """Replaces the batches of the first worker."""
        found = self._common.batches(seed, step, workers, first, last)
        if first == 0:
            rare = self._rare.batches(seed, step, workers, 0, 1)
            for own, other in zip(found, rare, strict=True):
                own[:1] = other
        return found

    def held_out(self, part: int = 0, parts: int = 1) -> Iterator[Batch]:
        """Shakespeare."""
        return self._rare.held_out(part, parts)

    def evaluate(self, model: nn.Module) -> tuple[float, float]:
        """The loss on Shakespeare, whom only the bad sender has; and, in place of right answers, on WikiText-2."""
        return self._rare.evaluate(model)[0], self._common.evaluate(model)[0]

    def to_json(self) -> dict[str, object]:
        """Describes both texts."""
        return {"rare": self._rare.to_json(), "common": self._common.to_json()}


def uneven(settings: SimSettings) -> Task:
    """Found by its name in other processes."""
    return Uneven(settings)


def runs(chosen: argparse.Namespace) -> list[Run]:
    """The most telling first."""
    found = []

    def add(kind: str, settings: SimSettings, **other: Any) -> None:
        for seed in range(SEEDS):
            each = dataclasses.replace(settings, first_seed=seed)
            found.append(Run(key=f"{kind}/{seed}", settings=each, **other))

    add("lossless", small(chosen, policies=("lossless",)))
    bad = PerLink.bad_sender(0, SENDERS, Bernoulli(p=RARE_LOSS), Bernoulli(p=0.02))
    only: dict[str, Any] = {"workers": SENDERS, "batch": 16}
    add("uneven/lossless", small(chosen, policies=("lossless",), **only), task=uneven)
    for weights in ("mean", "horvitz-thompson"):
        # Its broadcast is repaired: it is the gradients that are compared.
        repaired: dict[str, Any] = {"budget": 0.01, "gradient_budget": 1.0, "guard": None}
        settings = small(chosen, policies=("lead",), network=bad, weights=weights, **repaired, **only)
        add(f"uneven/{weights}", settings, task=uneven)
    models = {
        "wifi": PerLink.traces(chosen.data / "rutgers.jsonl", 16, 0),
        "rack": PerLink.bad_rack((0, 1, 2, 3), 16, Bernoulli(p=0.3), Bernoulli(p=0.01)),
        "shared": Shared(p=0.2, share=0.8),
        "stragglers": Stragglers(chance=0.1, delivered=0.5, network=Bernoulli(p=0.05)),
        "independent": Bernoulli(p=0.2),
        "bursts": GilbertElliott(p=0.2, burst=16),
    }
    for policy in ("lead", "plain"):
        for name, model in models.items():
            add(f"{name}/{policy}", small(chosen, policies=(policy,), network=model))
    return found


NAMES = {
    "independent": "independent",
    "bursts": "bursts of 16",
    "shared": "shared by receivers",
    "stragglers": "stragglers",
    "rack": "a bad rack",
    "wifi": "recorded Wi-Fi",
}


def table(found: dict[str, dict[str, Any]]) -> list[str]:
    """Rows of the page's table: what was lost, and perplexity above lossless."""
    rows = []
    for name, label in NAMES.items():
        lost = mean([run["broadcast_lost"] for run in seeds(found, f"{name}/lead")])
        cells = [f"{mean_text(above(found, f'{name}/{policy}', 'lossless'))} %" for policy in ("plain", "lead")]
        rows.append(f"| {label} | {100 * lost:.1f} % | {' | '.join(cells)} |")
    return rows


def draw(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Bars of what each network costs; and what the bad sender's data are worth."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), layout="constrained")
    others, rare = figure.subplots(1, 2, width_ratios=(2, 1))
    print("\n".join(table(found)))
    names = list(NAMES)
    known_policies = [policy for policy in ("lead", "plain") if any(seeds(found, f"{name}/{policy}") for name in names)]
    for number, policy in enumerate(known_policies):
        for at, name in enumerate(names):
            more = above(found, f"{name}/{policy}", "lossless")
            if more:
                x = at + 0.38 * (number - (len(known_policies) - 1) / 2)
                others.bar(x, mean(more), color=COLOURS[policy], width=0.36, label=policy if at == 0 else None)
                others.plot([x] * len(more), more, "k.", markersize=4)
    others.set_xticks(range(len(names)), [_with_loss(found, name) for name in names])
    others.axhline(0, color="#212529", linewidth=0.8)
    others.set(title="16 workers, 300 steps; a dot for each seed", ylabel="perplexity above lossless, per cent")
    others.legend(frameon=False)
    kinds = ("lossless", "mean", "horvitz-thompson")
    for at, kind in enumerate(kinds):
        results = seeds(found, f"uneven/{kind}")
        losses = [run["val_loss"] for run in results]
        if losses:
            colour = ("#495057", "#f59f00", "#1c7ed6")[at]
            rare.plot([at - 0.25, at + 0.25], [mean(losses)] * 2, color=colour, linewidth=3)
            # Side by side: two of them may be the same.
            rare.plot([at + 0.1 * (number - 1) for number in range(len(losses))], losses, "k.", markersize=6)
            print(f"uneven {kind}: loss on the bad sender's data {mean_text(losses, '.4f')}")
    rare.set_xticks(range(3), ["lossless", "mean of\narrived", "Horvitz-\nThompson"])
    known = [run["val_loss"] for kind in kinds for run in seeds(found, f"uneven/{kind}")]
    if known:
        rare.set_ylim(min(known) - 0.05, max(known) + 0.05)
    rare.set(
        title=f"one bad sender ({100 * RARE_LOSS:g} % lost)\nwith data of its own",
        ylabel="held-out loss on its data, nats",
    )
    for axis in (others, rare):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def _with_loss(found: dict[str, dict[str, Any]], name: str) -> str:
    lost = [run["broadcast_lost"] for policy in ("lead", "plain") for run in seeds(found, f"{name}/{policy}")]
    return f"{name}\n{100 * mean(lost):.0f} % lost" if lost else name


if __name__ == "__main__":
    main("networks", __doc__, runs, draw)

"""Does a deadline that changes from step to step pay: ADEL beside SALF and beside dropping whoever is late?

Handwritten digits of scikit-learn, 8 x 8, 30 users, a perceptron of three parts, whose backwards take an exponential
time each, 1 s on average. All ways have the same total time and make the same number of steps:
- dropping: users count only with a whole backward at the deadline, the same in all steps;
- SALF: parts that users have reached count, the deadline is the same in all steps;
- ADEL: the same with deadlines by its plan; also with other inertias of its weights, as weights that lag behind the
  deadlines change how far the first layers move, which could be taken for a gain of the plan;
- ADEL backwards: the plan from its end to its beginning, to see whether its order matters;
- nobody is late: what the others lose.
Two trainings: one with batches of 16 and a small rate, where noise hardly counts, and one with batches of 1 and a large
rate, where it decides.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits  # type: ignore[import-untyped]  # it has no types
from torch import nn

from stormtorch import ADEL, EXACT, LOSSY, SALF, BoundedDrift, OwnerPolicy, simulate
from stormtorch.network.loss import Bernoulli, LossModel, SlowBackward, Stragglers
from stormtorch.policies.policy import Deadline
from stormtorch.results.statistics import mean
from stormtorch.theory import layer_chances

PATH = Path(__file__).parent / "results" / "deadlines.json"
SEEDS, USERS, PARTS, STEPS, HELD_OUT = 5, 30, 3, 300, 500
MEANS_S = (0.5, 1.0, 2.0)
TRAININGS = {"batches of 16, rate 0.1": (16, 0.1), "batches of 1, rate 0.5": (1, 0.5)}
SETTINGS = {"users": USERS, "parts": PARTS, "part_s": 1.0, "steps": STEPS, "trainings": TRAININGS}
LATE: dict[str, Any] = {"reliability": EXACT, "gradients": LOSSY, "guard": None}


@dataclass(frozen=True, kw_only=True)
class Backwards(ADEL):
    """ADEL's plan from its end to its beginning."""

    def deadline_at(self, step: int) -> Deadline:
        """Returns the deadline of the step that is as far from the end."""
        return super().deadline_at(self.steps - 1 - step)


class Digits:
    """Digits, of which every user draws from all."""

    def __init__(self, seed: int, batch: int) -> None:
        found = load_digits()
        order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(seed))
        images = torch.tensor(found.data, dtype=torch.float32)[order] / 16.0
        labels = torch.tensor(found.target)[order]
        self.held_out = images[:HELD_OUT], labels[:HELD_OUT]
        self.images, self.labels = images[HELD_OUT:], labels[HELD_OUT:]
        self.seed, self.batch = seed, batch

    def batches(self, step: int, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Draws some pictures for each user."""
        random = torch.Generator().manual_seed(self.seed * 100_003 + step)
        chosen = torch.randint(len(self.labels), (USERS, self.batch), generator=random)[first:last]
        return self.images[chosen], self.labels[chosen]

    def judge(self, model: nn.Module) -> tuple[float, float]:
        """Returns the loss on all digits to learn from, and the accuracy on others."""
        loss = nn.functional.cross_entropy(model(self.images), self.labels)
        right = model(self.held_out[0]).argmax(1) == self.held_out[1]
        return float(loss), float(right.float().mean())


def objective(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Returns the loss of a user's batch."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def train(digits: Digits, policy: OwnerPolicy, network: LossModel, lr: float) -> dict[str, float]:
    """Trains once; what counts is the mean over the last 5 % of the steps."""
    torch.manual_seed(digits.seed)
    done = simulate(
        nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 10)),
        objective,
        digits.batches,
        lambda parameters: torch.optim.SGD(parameters, lr=lr),
        workers=USERS,
        steps=STEPS,
        network=network,
        policy=policy,
        seed=digits.seed,
        how="batched",
        at_once=USERS,
        evaluate=digits.judge,
        evaluate_every=STEPS // 100,
    )
    last = done.validations[-5:]
    return {"loss": mean([loss for _, loss, _ in last]), "accuracy": mean([right for *_, right in last])}


def ways(mean_s: float | None) -> dict[str, tuple[OwnerPolicy, LossModel]]:
    """Returns what is compared at a mean deadline; None is a training in which nobody is late."""
    if mean_s is None:
        return {"nobody is late": (BoundedDrift(lead=0.0, **LATE), Bernoulli(p=0.0))}
    slow = SlowBackward(part_s=1.0, parts=PARTS)
    late = 1.0 - layer_chances(PARTS, mean_s, 1.0)[-1]
    plan: dict[str, Any] = {"total_s": mean_s * STEPS, "steps": STEPS, "ranks": USERS, "layers": PARTS, "layer_s": 1.0}
    return {
        "dropping": (BoundedDrift(lead=0.0, **LATE), Stragglers(chance=late, delivered=1e-6, backwards=True)),
        "SALF": (SALF(deadline=mean_s, **LATE), slow),
        "ADEL": (ADEL(**plan, **LATE), slow),
        "ADEL, inertia 0.9": (ADEL(inertia=0.9, **plan, **LATE), slow),
        "ADEL, inertia 0.98": (ADEL(inertia=0.98, **plan, **LATE), slow),
        "ADEL backwards": (Backwards(**plan, **LATE), slow),
    }


def table(runs: dict[str, dict[str, float]]) -> list[str]:
    """A row of Markdown for each training, deadline and way: loss and accuracy, and the loss beside that of SALF."""
    rows = ["| training | mean deadline | way | loss | accuracy | loss over SALF's |", "|---|---|---|---|---|---|"]
    for training in TRAININGS:
        for mean_s in (None, *MEANS_S):
            for way in ways(mean_s):
                keys = [f"{training}/{mean_s or 0:g}/{way}/{seed}" for seed in range(SEEDS)]
                found = [runs[key] for key in keys if key in runs]
                salf = [runs.get(key.replace(f"/{way}/", "/SALF/")) for key in keys if key in runs]
                if not found:
                    continue
                ratios = torch.tensor(
                    [one["loss"] / other["loss"] for one, other in zip(found, salf, strict=True) if other]
                )
                beside = "-"
                if way != "SALF" and len(ratios) > 1:
                    beside = f"{float(ratios.mean()):.3f} ± {float(ratios.std() / len(ratios) ** 0.5):.3f}"
                loss, right = (mean([run[what] for run in found]) for what in ("loss", "accuracy"))
                cells = ("-" if mean_s is None else f"{mean_s:g} s", way, f"{loss:.4f}", f"{right:.1%}")
                rows.append(f"| {training} | {' | '.join(cells)} | {beside} |")
    return rows


def main() -> None:
    """Computes what is missing, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only runs whose key contains this")
    parser.add_argument("--draw", action="store_true", help="compute nothing, print what is there")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    runs: dict[str, dict[str, float]] = json.loads(PATH.read_text())["runs"] if PATH.exists() else {}
    for seed in range(0 if chosen.draw else SEEDS):
        for training, (batch, lr) in TRAININGS.items():
            for mean_s in (None, *MEANS_S):
                for way, (policy, network) in ways(mean_s).items():
                    key = f"{training}/{mean_s or 0:g}/{way}/{seed}"
                    if key not in runs and chosen.only in key:
                        runs[key] = train(Digits(seed, batch), policy, network, lr)
                        print(key, runs[key], flush=True)
                        PATH.write_text(json.dumps({"settings": SETTINGS, "runs": runs}, indent=1) + "\n")
    print("\n".join(table(runs)))


if __name__ == "__main__":
    main()

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

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from digits import Pictures, main, objective, perceptron, results
from stormtorch import EXACT, LOSSY, BoundedDrift, OwnerPolicy
from stormtorch.network.loss import Bernoulli, LossModel, SlowBackward, Stragglers
from stormtorch.policies.policy import Deadline
from stormtorch.telemetry.statistics import mean
from stormtorch.theory import layer_probabilities
from stormtorch_lab import ADEL, SALF, simulate

SEEDS, USERS, PARTS, STEPS = 5, 30, 3, 300
MEANS_S = (0.5, 1.0, 2.0)
TRAININGS = {"batches of 16, rate 0.1": (16, 0.1), "batches of 1, rate 0.5": (1, 0.5)}
LATE: dict[str, Any] = {"reliability": EXACT, "gradients": LOSSY, "guard": None}


@dataclass(frozen=True, kw_only=True)
class Backwards(ADEL):
    """ADEL's plan from its end to its beginning."""

    def deadline_at(self, step: int) -> Deadline:
        """Returns the deadline of the step that is as far from the end."""
        return super().deadline_at(self.steps - 1 - step)


class Digits(Pictures):
    """Digits, of which every user draws from all."""

    def __init__(self, seed: int, batch: int) -> None:
        super().__init__(seed)
        self.batch = batch

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


def train(digits: Digits, policy: OwnerPolicy, network: LossModel, lr: float) -> dict[str, float]:
    """Trains once; what counts is the mean over the last 5 % of the steps."""
    torch.manual_seed(digits.seed)
    done = simulate(
        perceptron(),
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
    late = 1.0 - layer_probabilities(PARTS, mean_s, 1.0)[-1]
    plan: dict[str, Any] = {"total_s": mean_s * STEPS, "steps": STEPS, "ranks": USERS, "layers": PARTS, "layer_s": 1.0}
    return {
        "dropping": (BoundedDrift(lead=0.0, **LATE), Stragglers(chance=late, delivered=1e-6, backwards=True)),
        "SALF": (SALF(deadline=mean_s, **LATE), slow),
        "ADEL": (ADEL(**plan, **LATE), slow),
        "ADEL, inertia 0.9": (ADEL(inertia=0.9, **plan, **LATE), slow),
        "ADEL, inertia 0.98": (ADEL(inertia=0.98, **plan, **LATE), slow),
        "ADEL backwards": (Backwards(**plan, **LATE), slow),
    }


def table(kept: dict[str, dict[str, Any]]) -> list[str]:
    """A row of Markdown for each training, deadline and way: loss and accuracy, and the loss beside that of SALF."""
    runs: dict[str, dict[str, float]] = results(kept)
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


def keys() -> list[str]:
    """Every run: training, mean deadline, way and seed."""
    return [
        f"{training}/{mean_s or 0:g}/{way}/{seed}"
        for seed in range(SEEDS)
        for training in TRAININGS
        for mean_s in (None, *MEANS_S)
        for way in ways(mean_s)
    ]


def answer(key: str) -> dict[str, float]:
    """Makes one run, as its key says."""
    training, mean_s, way, seed = key.split("/")
    batch, lr = TRAININGS[training]
    policy, network = ways(float(mean_s) or None)[way]
    return train(Digits(int(seed), batch), policy, network, lr)


if __name__ == "__main__":
    main("deadlines", __doc__, keys(), answer, table)

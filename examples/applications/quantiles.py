"""Federated quantile regression that finds the few variables that matter, over a network that loses packets.

Least squares follow outliers; a quantile does not. Of 200 variables here 8 have an effect, and the noise has tails so
heavy (Student's t with 2 degrees of freedom) that it has no variance. A penalty is to make the other 192
coefficients exactly zero. The usual one, L1, pulls the large coefficients towards zero as well, and the penalty that
predicts best keeps many variables that have no effect. SCAD and MCP let large coefficients go free: they are not
convex, but find the right variables.

FSPG (Mirzaeifard, Ghaderyan and Werner, 2024: Federated Smoothing Proximal Gradient for Quantile Regression with
Non-Convex Penalties) smooths the kink of the quantile loss, so that a plain gradient step works, and then applies the
penalty's proximal step, which has a closed form. Clients exchange gradients and coefficients; their data stay with
them. (The paper smooths less and less from step to step; here it is always the same.)

The data are made from the seed: 800 rows, dealt to the ranks, some noisier than others; neighbouring variables are
correlated. Each rank keeps further rows to choose the weight of the penalty by, and to measure the quantile loss on.

What to look at: the optimizer is our own, in 20 lines. `prepare` runs it like any other, each rank on the coefficients
that it owns. And all weights of all penalties are trained at once, as parameter groups with different settings.

    python examples/applications/quantiles.py --loss 0.1
    torchrun --nproc-per-node 2 examples/applications/quantiles.py --quantile 0.75
    stormtorch lab run --hosts 4 --loss 0.1 --management -- python examples/applications/quantiles.py
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from parts import contents_over_ranks, mean_over_ranks, options, policy_of, start, traffic
from torch import nn
from torch.nn import functional

import stormtorch

VARIABLES, EFFECTS, ROWS = 200, 8, 800
PENALTIES = ("L1", "SCAD", "MCP")
WEIGHTS = (0.007, 0.012, 0.02, 0.03, 0.045, 0.07, 0.1, 0.14)
SMOOTH = 0.5  # half the width over which the kink of the quantile loss is rounded
SCAD, MCP = 3.7, 3.0  # where a penalty ends, in multiples of its weight: the usual choices


def make_rows(count: int, effects: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes variables, each correlated with the one before by a half, and what they explain, with heavy noise."""
    variables = torch.randn(count, VARIABLES, generator=generator)
    for place in range(1, VARIABLES):
        variables[:, place] = 0.5 * variables[:, place - 1] + 0.75**0.5 * variables[:, place]
    # Student's t with 2 degrees of freedom: a normal variable over the root of an exponential one.
    noise = torch.randn(count, generator=generator) / (-torch.rand(count, generator=generator).log()).sqrt()
    noisier = torch.tensor([0.5, 1.0, 1.0, 1.5])[torch.arange(count) % 4]  # clients differ
    return variables, variables @ effects + noisier * noise


def soft(values: torch.Tensor, by: float) -> torch.Tensor:
    """Moves values towards zero, and those closer than that to zero itself."""
    return values.sign() * (values.abs() - by).clamp(min=0)


def proximal(values: torch.Tensor, penalty: str, weight: float, lr: float) -> torch.Tensor:
    """Returns the point that is best for penalty and closeness to `values` together, after a step of length `lr`."""
    size = values.abs()
    if penalty == "L1":
        return soft(values, lr * weight)
    if penalty == "MCP":
        return torch.where(size <= MCP * weight, soft(values, lr * weight) / (1 - lr / MCP), values)
    middle = soft(values, lr * weight * SCAD / (SCAD - 1)) / (1 - lr / (SCAD - 1))
    return torch.where(
        size <= (1 + lr) * weight, soft(values, lr * weight), torch.where(size <= SCAD * weight, middle, values)
    )


class ProximalGradient(torch.optim.Optimizer):
    """Steps down the gradient, then applies the penalty of the parameter group."""

    def __init__(self, groups: list[dict[str, Any]], lr: float) -> None:
        super().__init__(groups, {"lr": lr, "penalty": "L1", "weight": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Makes one step."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    moved = parameter - group["lr"] * parameter.grad
                    parameter.copy_(proximal(moved, group["penalty"], group["weight"], group["lr"]))
        return loss


class Regressions(nn.Module):
    """Many linear regressions of the same rows: one for each penalty and each of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = [(penalty, weight) for penalty in PENALTIES for weight in WEIGHTS]
        self.slopes = nn.ParameterList(torch.zeros(VARIABLES) for _ in self.settings)
        self.intercepts = nn.Parameter(torch.zeros(len(self.settings)))

    def groups(self) -> list[dict[str, Any]]:
        """Returns the parameter groups: intercepts have no penalty."""
        penalised = [
            {"params": [slopes], "penalty": penalty, "weight": weight}
            for slopes, (penalty, weight) in zip(self.slopes, self.settings, strict=True)
        ]
        return [*penalised, {"params": [self.intercepts]}]

    def forward(self, variables: torch.Tensor) -> torch.Tensor:
        """Returns a prediction of each regression for each row."""
        return variables @ torch.stack(list(self.slopes), 1) + self.intercepts


def quantile_loss(missing: torch.Tensor, quantile: float) -> torch.Tensor:
    """Returns the loss of each regression, which the quantile minimises: what lies above weighs `quantile`."""
    return torch.maximum(quantile * missing, (quantile - 1) * missing).mean(0)


def smooth_loss(missing: torch.Tensor, quantile: float) -> torch.Tensor:
    """Returns the same for the step, summed over regressions, rounded within `SMOOTH` of its kink."""
    rounded = functional.huber_loss(missing, torch.zeros_like(missing), reduction="none", delta=SMOOTH) / SMOOTH
    return ((quantile - 0.5) * missing + 0.5 * rounded).mean(0).sum()


def train(arguments: argparse.Namespace, seed: int) -> dict[str, float]:
    """Trains all regressions, and returns, for the weight of each penalty that predicts best, how it does."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(seed)
    effects = torch.zeros(VARIABLES)
    signs = 2.0 * torch.randint(2, (EFFECTS,), generator=generator) - 1.0
    effects[torch.randperm(VARIABLES, generator=generator)[:EFFECTS]] = signs * (
        0.5 + 0.5 * torch.rand(EFFECTS, generator=generator)
    )
    mine = slice(rank, None, ranks)  # each rank's rows; a rank draws all of them only because they are made
    learned, chosen_by, held_out = (
        tuple(each[mine] for each in make_rows(count, effects, generator)) for count in (ROWS, 1000, 4000)
    )

    model = Regressions()
    optimizer = ProximalGradient(model.groups(), lr=0.5)
    model, optimizer = stormtorch.prepare(model, optimizer, policy=policy_of(arguments))
    for _ in range(arguments.steps):
        smooth_loss(learned[1][:, None] - model(learned[0]), arguments.quantile).backward()
        optimizer.step()
        optimizer.zero_grad()

    found: dict[str, float] = {}
    with stormtorch.exact(model), torch.no_grad():
        validation, test = (
            [mean_over_ranks([float(loss)]) for loss in quantile_loss(told[:, None] - model(rows), arguments.quantile)]
            for rows, told in (chosen_by, held_out)
        )
        noise = held_out[1] - held_out[0] @ effects
        least = quantile_loss((noise - noise.quantile(arguments.quantile))[:, None], arguments.quantile)
        truth = mean_over_ranks([float(least)])  # of the true coefficients, with the best intercept
        for penalty in PENALTIES:
            tried = [index for index, (name, _) in enumerate(model.settings) if name == penalty]
            best = min(tried, key=lambda index: validation[index])
            slopes = model.slopes[best]
            right = int(((slopes != 0) & (effects != 0)).sum())
            found[f"{penalty} weight"] = model.settings[best][1]
            found[f"{penalty} quantile loss"] = test[best]
            found[f"{penalty} excess"] = test[best] / truth - 1
            found[f"{penalty} found"] = right
            found[f"{penalty} wrong"] = int((slopes != 0).sum()) - right
            found[f"{penalty} F1"] = 2 * right / (int((slopes != 0).sum()) + EFFECTS)
            found[f"{penalty} error"] = float((slopes - effects).norm())
        found["replicas"] = contents_over_ranks(model)
    return found | traffic(optimizer)


if __name__ == "__main__":
    parser = options(__doc__, steps=200)
    parser.add_argument("--quantile", type=float, default=0.5, help="which quantile to predict (0.5, the median)")
    start(train, parser)

"""What does privacy cost where ranks add noise of their own, and what do masks between them save: LightDP-FL?

Handwritten digits of scikit-learn, 8 x 8; 50 clients with 25 pictures each; a linear model, 40 rounds of one step on
all of a client's pictures, each gradient of a picture clipped to a norm of 1. Two ways to be (epsilon, 0.0001)-private:
- local noise: each upload has as much noise as makes it private by itself.
- LightDP-FL: all uploads together have it, and masks that two clients share hide single ones. The noise of one upload
  and its masks is as much as local noise, but masks are gone from the sum of all.
Where packets are lost, masks whose other half is missing stay in the mean, and a client that missed a model uploads two
rounds of its own, which epsilon does not count.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from digits import Pictures, main, results
from stormtorch.network.loss import Bernoulli
from stormtorch.telemetry.statistics import mean
from stormtorch_lab import LightDp, simulate
from stormtorch_lab.privacy import noise_for

SEEDS = 5
LOSSES = (0.0, 0.1)
EPSILONS = (3.0, 6.0, 9.0)
CLIENTS, PICTURES = 50, 25
ROUNDS, RATE, CLIP, DELTA = 40, 2.0, 1.0, 1e-4


def policy(way: str, epsilon: float, seed: int) -> LightDp:
    """The policy with the noise that epsilon takes."""
    if way == "no privacy":
        return LightDp(every=1)
    noise = noise_for(epsilon, sample_rate=1.0, steps=ROUNDS, delta=DELTA)
    # One picture more moves a client's model by at most this, and the sum of all models as much.
    enough = noise * RATE * CLIP / PICTURES
    if way == "local noise":
        return LightDp(every=1, noise=enough, key_seed=seed)
    return LightDp(every=1, noise=enough / math.sqrt(CLIENTS), mask=enough / math.sqrt(CLIENTS - 1), key_seed=seed)


def clipped(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Returns a loss whose gradient is the mean of the pictures' gradients, each clipped to a norm.

    Of a linear model, the gradient of a picture is the outer product of its error and its input.
    """
    images, labels = batch
    out = model(images)
    error = out.detach().softmax(-1) - nn.functional.one_hot(labels, 10)
    norm = error.norm(dim=-1) * (images.square().sum(-1) + 1.0).sqrt()
    losses = nn.functional.cross_entropy(out, labels, reduction="none")
    weighed: torch.Tensor = losses * (CLIP / norm).clamp(max=1.0)
    return weighed.mean()


def accuracy(way: str, epsilon: float, loss: float, seed: int) -> float:
    """Trains once. Returns the fraction of right answers on pictures that no client has."""
    pictures, own = Pictures(seed), CLIENTS * PICTURES
    x, y = pictures.images[:own].view(CLIENTS, PICTURES, 64), pictures.labels[:own].view(CLIENTS, PICTURES)
    model = nn.Linear(64, 10)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    done = simulate(
        model,
        clipped,
        lambda _step, first, last: (x[first:last], y[first:last]),
        lambda parameters: torch.optim.SGD(parameters, lr=RATE),
        workers=CLIENTS,
        steps=ROUNDS,
        network=Bernoulli(p=loss),
        policy=policy(way, epsilon, seed),
        seed=seed,
        evaluate=pictures.judge,
    )
    return done.validations[-1][2]


def keys() -> list[str]:
    """Every run: way, epsilon, loss and seed."""
    private = [(way, epsilon) for way in ("local noise", "LightDP-FL") for epsilon in EPSILONS]
    ways = [("no privacy", math.inf), *private]
    return [f"{way}/{epsilon:g}/{loss:g}/{seed}" for seed in range(SEEDS) for loss in LOSSES for way, epsilon in ways]


def answer(key: str) -> float:
    """Makes one run, as its key says."""
    way, epsilon, loss, seed = key.split("/")
    return accuracy(way, float(epsilon), float(loss), int(seed))


def table(kept: dict[str, dict[str, Any]]) -> list[str]:
    """A row of Markdown for each way and epsilon."""
    runs: dict[str, float] = results(kept)
    rows = []
    for prefix in dict.fromkeys(key.rsplit("/", 2)[0] for key in keys()):
        way, epsilon = prefix.split("/")
        cells = []
        for loss in LOSSES:
            found = [right for key, right in runs.items() if key.rpartition("/")[0] == f"{prefix}/{loss:g}"]
            cells.append(f"{mean(found):.1%}" if found else "-")
        rows.append(f"| {way} | {'-' if epsilon == 'inf' else epsilon} | {' | '.join(cells)} |")
    return rows


if __name__ == "__main__":
    main("private", __doc__, keys(), answer, table)

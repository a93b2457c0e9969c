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

import argparse
import json
import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch
from sklearn.datasets import load_digits  # type: ignore[import-untyped]  # it has no types
from torch import nn

from stormtorch import LightDp, simulate
from stormtorch.network.loss import Bernoulli
from stormtorch.privacy import noise_for
from stormtorch.results.statistics import mean

RESULTS = Path(__file__).parent / "results"
SEEDS = 5
LOSSES = (0.0, 0.1)
EPSILONS = (3.0, 6.0, 9.0)
CLIENTS, PICTURES, HELD_OUT = 50, 25, 500
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
    random = torch.Generator().manual_seed(seed)
    found = load_digits()
    order = torch.randperm(len(found.target), generator=random)
    images = torch.tensor(found.data, dtype=torch.float32)[order] / 16.0
    labels = torch.tensor(found.target)[order]
    own = slice(HELD_OUT, HELD_OUT + CLIENTS * PICTURES)
    x, y = images[own].view(CLIENTS, PICTURES, 64), labels[own].view(CLIENTS, PICTURES)

    def judge(model: nn.Module) -> tuple[float, float]:
        out = model(images[:HELD_OUT])
        right = (out.argmax(1) == labels[:HELD_OUT]).float().mean()
        return float(nn.functional.cross_entropy(out, labels[:HELD_OUT])), float(right)

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
        evaluate=judge,
    )
    return done.validations[-1][2]


def keys() -> list[str]:
    """Every run: way, epsilon, loss and seed."""
    private = [(way, epsilon) for way in ("local noise", "LightDP-FL") for epsilon in EPSILONS]
    ways = [("no privacy", math.inf), *private]
    return [f"{way}/{epsilon:g}/{loss:g}/{seed}" for seed in range(SEEDS) for loss in LOSSES for way, epsilon in ways]


def answer(key: str) -> tuple[str, float]:
    """Makes one run, as its key says."""
    way, epsilon, loss, seed = key.split("/")
    return key, accuracy(way, float(epsilon), float(loss), int(seed))


def table(runs: dict[str, float]) -> list[str]:
    """A row of Markdown for each way and epsilon."""
    rows = []
    for prefix in dict.fromkeys(key.rsplit("/", 2)[0] for key in keys()):
        way, epsilon = prefix.split("/")
        cells = []
        for loss in LOSSES:
            found = [right for key, right in runs.items() if key.rpartition("/")[0] == f"{prefix}/{loss:g}"]
            cells.append(f"{mean(found):.1%}" if found else "-")
        rows.append(f"| {way} | {'-' if epsilon == 'inf' else epsilon} | {' | '.join(cells)} |")
    return rows


def main() -> None:
    """Computes what is missing, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1, help="runs at a time, each with one thread")
    parser.add_argument("--draw", action="store_true", help="compute nothing, print what is there")
    chosen = parser.parse_args()
    path = RESULTS / "private.json"
    found: dict[str, float] = json.loads(path.read_text())["runs"] if path.exists() else {}
    missing = [] if chosen.draw else [key for key in keys() if key not in found]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(chosen.processes, spawn, torch.set_num_threads, (1,)) as pool:
        for done in as_completed([pool.submit(answer, key) for key in missing]):
            key, found[key] = done.result()
            print(key, f"{found[key]:.3f}", flush=True)
            path.write_text(json.dumps({"runs": dict(sorted(found.items()))}, indent=1) + "\n")
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()

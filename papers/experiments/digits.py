"""What experiments with scikit-learn's handwritten digits share: the pictures, and a command that keeps its answers.

An experiment is a list of keys, each ending in a seed, a function that answers one of them, and a table of all answers:

    if __name__ == "__main__":
        main("private", __doc__, keys(), answer, table)
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import as_completed
from typing import Any

import torch
from grid import keep, load
from pool import pool
from sklearn.datasets import load_digits  # type: ignore[import-untyped]  # it has no types
from torch import nn

from stormtorch.cli.terminal.screen import progress_bar
from stormtorch_lab.jobs.surroundings import surroundings

HELD_OUT = 500


class Pictures:
    """All digits, 8 x 8, in an order that a seed draws: the first 500 are held out, the others to learn from."""

    def __init__(self, seed: int) -> None:
        found = load_digits()
        order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(seed))
        images = torch.tensor(found.data, dtype=torch.float32)[order] / 16.0
        labels = torch.tensor(found.target)[order]
        self.held_out = images[:HELD_OUT], labels[:HELD_OUT]
        self.images, self.labels = images[HELD_OUT:], labels[HELD_OUT:]
        self.seed = seed

    def judge(self, model: nn.Module) -> tuple[float, float]:
        """Returns loss and accuracy on what is held out."""
        images, labels = self.held_out
        out = model(images)
        return float(nn.functional.cross_entropy(out, labels)), float((out.argmax(1) == labels).float().mean())


def perceptron() -> nn.Module:
    """A perceptron of three layers."""
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 10))


def objective(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Returns the loss of a client's batch."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def answered(answer: Callable[[str], Any], key: str) -> dict[str, Any]:
    """Makes one run. Returns its answer with what it takes to repeat it."""
    began = time.monotonic()
    result = answer(key)
    pixels = load_digits().data.astype("uint8").tobytes()
    return {
        "result": result,
        "seed": int(key.rpartition("/")[2]),
        "data": {"name": "digits of scikit-learn", "sha256": hashlib.sha256(pixels).hexdigest()[:16]},
        "seconds": round(time.monotonic() - began, 1),
        **surroundings(),
    }


def results(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The answers alone, by key."""
    return {key: run["result"] for key, run in found.items()}


def main(
    name: str,
    about: str,
    keys: Sequence[str],
    answer: Callable[[str], Any],
    table: Callable[[dict[str, Any]], list[str]],
) -> None:
    """An experiment's command line: computes what is missing in results/NAME.json, and prints the table."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1, help="runs at a time, each with one thread")
    parser.add_argument("--only", default="", help="only runs whose key contains this")
    parser.add_argument("--draw", action="store_true", help="compute nothing, print what is there")
    chosen = parser.parse_args()
    found = load(name)
    missing = [] if chosen.draw else [key for key in keys if key not in found and chosen.only in key]
    with progress_bar(len(missing), name, unit="runs") as advance, pool(chosen.processes) as computing:
        asked = {computing.submit(answered, answer, key): key for key in missing}
        for count, done in enumerate(as_completed(asked), 1):
            found[asked[done]] = done.result()
            keep(name, found)
            advance(asked[done], count)
    print("\n".join(table(found)))

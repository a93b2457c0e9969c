"""What experiments with scikit-learn's handwritten digits share: the pictures, and a command that keeps its answers.

An experiment is a list of keys, a function that answers one of them, and a table of all answers:

    if __name__ == "__main__":
        main("private", __doc__, keys(), answer, table)
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from concurrent.futures import as_completed
from typing import Any

import torch
from grid import RESULTS, load
from pool import pool
from sklearn.datasets import load_digits  # type: ignore[import-untyped]  # it has no types
from torch import nn

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
    found: dict[str, Any] = load(name)
    missing = [] if chosen.draw else [key for key in keys if key not in found and chosen.only in key]
    with pool(chosen.processes) as computing:
        asked = {computing.submit(answer, key): key for key in missing}
        for done in as_completed(asked):
            key = asked[done]
            found[key] = done.result()
            print(key, found[key], flush=True)
            text = json.dumps({"runs": dict(sorted(found.items()))}, indent=1)
            (RESULTS / f"{name}.json").write_text(f"{text}\n", encoding="utf-8")
    print("\n".join(table(found)))

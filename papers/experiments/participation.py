"""What do memories and partial gradients buy where ranks take part unevenly: MIFA, AREA, SALF, beside the usual ways?

Handwritten digits of scikit-learn, 8 x 8. Four questions:
- availability: 100 clients with two digits each, of which those with small digits are seldom there. MIFA beside
  federated averaging.
- speed: 50 clients with two digits each, whose speeds differ by ten. AREA beside FedBuff and federated averaging, with
  weight decay, so that the best model depends on how much each client counts.
- separable: the same without weight decay, where one model suits all clients.
- stragglers: 30 users, nine of ten late at each step, a perceptron. SALF beside dropping whoever is late.
Each with 10 % packet loss in both directions, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from digits import Pictures, main, objective, perceptron, results
from stormtorch import EXACT, LOSSY, BoundedDrift, DiLoCo, Policy, RankPolicy
from stormtorch.network.loss import Bernoulli, LossModel, Stragglers
from stormtorch.policies.memory import NO_MEMORY, Memory
from stormtorch.policies.policy import Numbers
from stormtorch.telemetry.statistics import mean
from stormtorch_lab import AREA, MIFA, SALF, simulate

SEEDS = 5
LOSSES = (0.0, 0.1)
RATES = (0.05, 0.2, 0.8)


@dataclass(frozen=True, kw_only=True)
class FedBuff(RankPolicy):
    """Whoever has made its steps sends its update; the model moves by the mean of the updates of a round."""

    by_steps: ClassVar[bool] = False

    def begin_owner(self, owner: Memory, values: torch.Tensor) -> None:
        """Begins with the parameters."""
        owner["parameters"] = values

    def begin_rank(self, rank: Memory, values: torch.Tensor) -> None:
        """Remembers where a client starts."""
        rank["start"] = values

    def send(self, own: torch.Tensor, loss: Numbers, rank: Memory = NO_MEMORY) -> torch.Tensor:
        """Sends the update."""
        return own - rank["start"]

    def update(self, owner: Memory, combined: torch.Tensor) -> torch.Tensor:
        """Moves the parameters by the mean update."""
        return owner["parameters"].add_(combined)

    def accept(
        self, own: torch.Tensor, received: torch.Tensor, arrived: torch.Tensor, rank: Memory = NO_MEMORY
    ) -> torch.Tensor:
        """Starts from the new parameters."""
        rank["start"] = torch.where(arrived, received, own)
        return rank["start"]


class Digits(Pictures):
    """Digits, of which each client has two kinds, or all."""

    def __init__(self, clients: int, seed: int, *, two: bool) -> None:
        super().__init__(seed)
        self.kinds = [(client % 10, (client + 1) % 10) for client in range(clients)]
        every = torch.arange(len(self.labels))
        self.places = [
            torch.cat([every[self.labels == kind] for kind in kinds]) if two else every for kinds in self.kinds
        ]

    def batches(self, step: int, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Draws 16 pictures for each client."""
        chosen = []
        for client in range(first, last):
            random = torch.Generator().manual_seed(hash((self.seed, step, client)) % 2**63)
            at = torch.randint(len(self.places[client]), (16,), generator=random)
            chosen.append(self.places[client][at])
        picked = torch.stack(chosen)
        return self.images[picked], self.labels[picked]


def train(
    digits: Digits,
    model: nn.Module,
    policy: Policy,
    network: LossModel,
    steps: int,
    lr: float,
    works: Callable[[int], torch.Tensor] | None = None,
    decay: float = 0.0,
) -> dict[str, float]:
    """Trains once, and judges the mean model, or the owners'."""
    done = simulate(
        model,
        objective,
        digits.batches,
        lambda parameters: torch.optim.SGD(parameters, lr=lr, weight_decay=decay),
        workers=len(digits.places),
        steps=steps,
        network=network,
        policy=policy,
        seed=digits.seed,
        works=works,
        evaluate=digits.judge,
        evaluate_every=max(steps // 20, 1),
    )
    # The last fifth: what a training with uneven participation ends at jumps from round to round.
    last = done.validations[-4:]
    return {"loss": mean([loss for _, loss, _ in last]), "accuracy": mean([right for *_, right in last])}


def availability(seed: int, loss: float) -> dict[str, dict[str, float]]:
    """Compares policies where clients with small digits are seldom there."""
    digits, every = Digits(100, seed, two=True), 5
    chance = torch.tensor([0.1 + 0.9 * min(kinds) / 9 for kinds in digits.kinds])

    def works(step: int) -> torch.Tensor:
        random = torch.Generator().manual_seed(seed * 100_003 + step // every)
        return torch.rand(100, generator=random) < chance

    policies = {
        "federated averaging": DiLoCo(every=every, outer_lr=1.0, momentum=0.0, at_least=0),
        "MIFA": MIFA(every=every),
    }
    return _each(policies, digits, lambda: nn.Linear(64, 10), Bernoulli(p=loss), 1000, 0.05, works)


def speed(seed: int, loss: float, decay: float = 0.01) -> dict[str, dict[str, float]]:
    """Compares policies where clients with small digits are slow."""
    digits, every = Digits(50, seed, two=True), 5
    rate = torch.tensor([0.1 + 0.9 * min(kinds) / 9 for kinds in digits.kinds])

    def works(step: int) -> torch.Tensor:
        random = torch.Generator().manual_seed(seed * 100_003 + step)
        return torch.rand(50, generator=random) < rate

    policies = {
        "federated averaging": DiLoCo(every=every, outer_lr=1.0, momentum=0.0, at_least=0),
        "FedBuff": FedBuff(every=every, at_least=every),
        "AREA": AREA(every=every, at_least=every),
    }
    # A report moves AREA's mean by one fiftieth, and the others by more: each has the rate with which it learns best.
    found: dict[str, dict[str, float]] = {}
    for lr in RATES:
        each = _each(policies, digits, lambda: nn.Linear(64, 10), Bernoulli(p=loss), 1500, lr, works, decay)
        found |= {f"{name}, rate {lr:g}": result for name, result in each.items()}
    return found


def separable(seed: int, loss: float) -> dict[str, dict[str, float]]:
    """Compares them where one model suits all clients."""
    return speed(seed, loss, decay=0.0)


def stragglers(seed: int, loss: float) -> dict[str, dict[str, float]]:
    """Compares ways to treat users who are late."""
    digits = Digits(30, seed, two=False)
    common: dict[str, Any] = {"reliability": EXACT, "gradients": LOSSY, "guard": None}
    late = Stragglers(chance=0.9, backwards=True, network=Bernoulli(p=loss))
    dropped = Stragglers(chance=0.9, backwards=True, delivered=1e-6, network=Bernoulli(p=loss))

    found: dict[str, dict[str, float]] = {}
    for name, policy, network in (
        ("nobody is late", BoundedDrift(lead=0.0, **common), Bernoulli(p=loss)),
        ("late ones are dropped", BoundedDrift(lead=0.0, **common), dropped),
        ("SALF", SALF(deadline=None, **common), late),
    ):
        found |= _each({name: policy}, digits, perceptron, network, 400, 0.1)
    return found


def _each(
    policies: dict[str, Any],
    digits: Digits,
    model: Callable[[], nn.Module],
    network: LossModel,
    steps: int,
    lr: float,
    works: Callable[[int], torch.Tensor] | None = None,
    decay: float = 0.0,
) -> dict[str, dict[str, float]]:
    found = {}
    for name, policy in policies.items():
        torch.manual_seed(digits.seed)
        found[name] = train(digits, model(), policy, network, steps, lr, works, decay)
    return found


QUESTIONS: dict[str, Callable[[int, float], dict[str, dict[str, float]]]] = {
    "availability": availability,
    "speed": speed,
    "separable": separable,
    "stragglers": stragglers,
}


def answer(key: str) -> dict[str, dict[str, float]]:
    """Runs one question with one loss and seed, as its key says."""
    name, loss, seed = key.split("/")
    return QUESTIONS[name](int(seed), float(loss))


def table(kept: dict[str, dict[str, Any]]) -> list[str]:
    """A row of Markdown for each question and policy: of several rates, that with the least loss."""
    rows = []
    for question in QUESTIONS:
        runs = {key: run for key, run in results(kept).items() if key.startswith(f"{question}/")}
        names = list(dict.fromkeys(name for run in runs.values() for name in run))
        best: dict[str, str] = {}
        for name in names:
            policy = name.partition(",")[0]
            if policy not in best or _mean(runs, 0.0, name, "loss") < _mean(runs, 0.0, best[policy], "loss"):
                best[policy] = name
        for name in best.values():
            cells = [
                f"{_mean(runs, loss, name, 'loss'):.3f} | {_mean(runs, loss, name, 'accuracy'):.1%}" for loss in LOSSES
            ]
            rows.append(f"| {question} | {name} | {' | '.join(cells)} |")
    return rows


def _mean(runs: dict[str, Any], loss: float, name: str, what: str) -> float:
    return mean([run[name][what] for key, run in sorted(runs.items()) if key.split("/")[1] == f"{loss:g}"])


if __name__ == "__main__":
    every = [f"{name}/{loss:g}/{seed}" for seed in range(SEEDS) for loss in LOSSES for name in QUESTIONS]
    main("participation", __doc__, every, answer, table)

"""Parity in simulations: what it brings back, what it costs, and what leads make of it."""

from dataclasses import dataclass

import torch
from torch import nn

from stormtorch import theory
from stormtorch.policies import BoundedDrift
from stormtorch.policies.ledger import Row
from stormtorch.policies.policy import Numbers
from stormtorch.reliability import Reliability
from stormtorch.simulation.run import simulate

LOSSY = Reliability(budget=1.0)
WORKERS = 8


def wide() -> nn.Module:
    """A model of 57 chunks of int8, seven for each of eight workers."""
    torch.manual_seed(0)
    return nn.Linear(280, 280)


def square(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model(inputs).square().mean()
    return out


def train(policy: BoundedDrift, steps: int = 12, network: float = 0.4, seed: int = 0) -> list[Row]:
    inputs = torch.randn(WORKERS, 2, 280)
    done = simulate(
        wide(),
        square,
        lambda step, first, last: inputs[first:last],
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        workers=WORKERS,
        steps=steps,
        network=network,
        policy=policy,
        seed=seed,
    )
    return list(done.ledger)


def test_leads_follow_what_parity_leaves() -> None:
    # The first steps lose 40 % and send no parity yet. A lead of their loss would reach 0.5 in the first with parity, and fade slowly.
    rows = train(BoundedDrift(reliability=LOSSY, wire=torch.int8, redundancy="auto"))
    begun = [row for row in rows if row.parity_bytes]
    assert 9 <= len(begun) <= 11
    assert max(row.lead for row in rows) > 0.3
    left = theory.residual_loss(0.4, 7, theory.most_parity(7, 4))
    assert all(0.3 * theory.lead(left) < row.lead < 1.7 * theory.lead(left) for row in begun)


def test_weights_follow_what_parity_leaves() -> None:
    seen: list[float] = []

    @dataclass(frozen=True, kw_only=True)
    class Later(BoundedDrift):
        """Sends parity from step 25 on; before the first step it says how much that may be."""

        def protect(self, loss: float, chunks: int, narrower: float) -> float:
            return 1.0 if not seen or len(seen) >= 25 else 0.0

        def send(self, own: torch.Tensor, loss: Numbers) -> torch.Tensor:
            seen.append(float(torch.as_tensor(loss).mean()))
            return super().send(own, loss)

    rows = train(Later(reliability=LOSSY, wire=torch.int8, redundancy="auto", weights="horvitz-thompson"), steps=30)
    # A worker's links to seven others lose; that to itself does not.
    assert sum(row.gradients[0] for row in rows[25:]) / 5 > 0.85
    assert 0.2 < seen[24] < 0.4
    assert max(seen[25:]) < 0.1

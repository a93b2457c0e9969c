"""Forward error correction in simulations: recovered chunks, cost, and effect on the lead."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from stormtorch import theory
from stormtorch.collectives.formats.grid import GRIDS
from stormtorch.exchange.reliability import EXACT, Reliability
from stormtorch.policies import BoundedDrift
from stormtorch.policies.policy import Numbers
from stormtorch.telemetry.ledger import LedgerRow
from stormtorch.telemetry.statistics import mean
from stormtorch_lab.simulation.parameters.rounding import round_to_grids_
from stormtorch_lab.simulation.run import simulate

LOSSY = Reliability(budget=1.0)
WORKERS = 8


def wide() -> nn.Module:
    """A model of 57 chunks of int8, seven for each of eight workers."""
    torch.manual_seed(0)
    return nn.Linear(280, 280)


def square(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model(inputs).square().mean()
    return out


def train(policy: BoundedDrift, steps: int = 12, network: float = 0.4, seed: int = 0) -> list[LedgerRow]:
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


@pytest.mark.thorough
@pytest.mark.parametrize("redundancy", [0.0, 0.5, 1.0])
def test_parity_brings_back_what_theory_says_and_costs_its_bytes(redundancy: float) -> None:
    rows = train(BoundedDrift(reliability=LOSSY, wire=torch.int8, redundancy=redundancy, guard=None), steps=20)
    there = mean([fraction for row in rows for fraction in (*row.gradients.values(), *row.broadcast.values())])
    # Shards have seven chunks, and one eight.
    left = theory.residual_loss(0.4, 7, redundancy)
    assert 1.0 - there == pytest.approx(left, abs=0.04)
    plain = train(BoundedDrift(reliability=LOSSY, wire=torch.int8, guard=None), steps=1)[0].bytes_sent
    parity = theory.parity_of(redundancy, 7) / 7
    assert all(row.bytes_sent == pytest.approx((1.0 + parity) * plain, rel=0.05) for row in rows)
    assert all(row.parity_bytes == row.bytes_sent - plain for row in rows)
    assert all((row.recovered > 0) == (redundancy > 0.0) for row in rows)


def test_what_is_sent_again_counts_where_a_budget_is_to_be_met() -> None:
    once = train(BoundedDrift(reliability=LOSSY, guard=None), steps=1)[0].bytes_sent
    rows = train(BoundedDrift(reliability=Reliability(budget=1e-6), guard=None), steps=30)
    # Of a message nothing may be missing, so every chunk is sent until it has arrived.
    assert mean([row.bytes_sent for row in rows]) == pytest.approx(once / 0.6, rel=0.02)


@pytest.mark.parametrize("wire, share, block", [(torch.int8, 0.25, 1024), (list(GRIDS)[-1], 0.14, 128)], ids=str)
def test_grids_cost_few_bytes_and_round_without_bias(wire: torch.dtype, share: float, block: int) -> None:
    plain, narrow = (train(BoundedDrift(wire=each), steps=1)[0].bytes_sent for each in (torch.float32, wire))
    assert narrow == pytest.approx(share * plain, rel=0.05)
    steps = GRIDS[wire].steps
    values = torch.linspace(-1.0, 3.0, 1400).expand(400, 1, 1400).contiguous()
    before = values.clone()
    round_to_grids_(values, GRIDS[wire], seed=(0, 1), sender=0)
    off = values - before
    span = 4.0 * (block - 1) / 1399  # of the values of a block
    assert 0.45 * span / steps < float(off.abs().max()) <= 0.505 * span / steps
    assert float(off.mean().abs()) < 0.01 * span / steps
    assert float(off.mean(0).abs().max()) < 6.0 * span / steps / (12 * 400) ** 0.5
    again = before.clone()
    round_to_grids_(again[100:], GRIDS[wire], seed=(0, 1), sender=100)
    assert torch.equal(again[100:], values[100:])


def test_a_redundancy_where_all_is_sent_again_is_refused_by_name() -> None:
    wrongs: list[dict[str, Any]] = [{"reliability": EXACT, "redundancy": 1.0}, {"redundancy": 5.0}, {"redundancy": "x"}]
    for wrong in wrongs:
        with pytest.raises(ValueError, match="redundancy must"):
            BoundedDrift(**wrong)


def test_leads_follow_what_parity_leaves() -> None:
    # The first steps lose 40 % and send no parity yet. A lead of their loss would reach 0.5 in the first with parity,
    # and fade slowly.
    rows = train(BoundedDrift(reliability=LOSSY, wire=torch.int8, redundancy="auto"))
    begun = [row for row in rows if row.parity_bytes]
    assert 9 <= len(begun) <= 11
    assert max(row.lead for row in rows) > 0.3
    left = theory.residual_loss(0.4, 7, theory.most_redundancy(7, 4))
    assert all(0.3 * theory.lead(left) < row.lead < 1.7 * theory.lead(left) for row in begun)


def test_weights_follow_what_parity_leaves() -> None:
    seen: list[float] = []

    @dataclass(frozen=True, kw_only=True)
    class Later(BoundedDrift):
        """Sends parity from step 25 on; before the first step it says how much that may be."""

        def protect(self, loss: float, chunks: int, compression_ratio: float) -> float:
            return 1.0 if not seen or len(seen) >= 25 else 0.0

        def send(self, own: torch.Tensor, loss: Numbers) -> torch.Tensor:
            seen.append(float(torch.as_tensor(loss).mean()))
            return super().send(own, loss)

    rows = train(Later(reliability=LOSSY, wire=torch.int8, redundancy="auto", weights="horvitz-thompson"), steps=30)
    # A worker's links to seven others lose; that to itself does not.
    assert sum(row.gradients[0] for row in rows[25:]) / 5 > 0.85
    assert 0.2 < seen[24] < 0.4
    assert max(seen[25:]) < 0.1

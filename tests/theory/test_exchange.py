"""Time of a step at a bottleneck: its parts, and comparison with steps measured in the lab."""

import json
from pathlib import Path

import pytest
import torch

from stormtorch import theory
from stormtorch.exchange.reliability import Reliability
from stormtorch.network.loss import Bernoulli
from stormtorch_lab.simulation.arrivals.masks import Masks
from stormtorch_lab.simulation.arrivals.repair import arrived

pytestmark = pytest.mark.pure

BENCHMARKS = Path(__file__).parents[2] / "papers" / "benchmarks"
LINE = theory.Bottleneck(bits_per_s=8e6, round_trip_s=0.1)


def test_a_step_computes_and_sends_everything_twice() -> None:
    # 3 of 4 MB leave in each stage, a second each MB; and each stage ends half a round trip after its last byte.
    assert theory.step_on_bottleneck_s(LINE, n=4, model_bytes=4e6, p=0.1, compute_s=2.0) == pytest.approx(2 + 6 + 0.1)
    assert theory.step_on_bottleneck_s(LINE, n=4, model_bytes=4e6, p=0.1, redundancy=0.5) == pytest.approx(9 + 0.1)
    repaired = theory.step_on_bottleneck_s(LINE, n=4, model_bytes=4e6, p=0.1, budgets=(0.01, 1.0))
    assert repaired == pytest.approx(6 + 0.3 + 0.1 + 0.1)  # a tenth of one stage again, a round trip later
    exact = theory.step_on_bottleneck_s(LINE, n=4, model_bytes=4e6, p=0.1, budgets=(0.0, 0.0))
    assert 6 / 0.9 + 0.1 + 0.4 < exact < 6 / 0.9 + 0.1 + 1.0


@pytest.mark.parametrize("p, budget", [(0.1, 0.01), (0.4, 0.01), (0.4, 0.3), (0.1, 0.2)])
def test_as_much_is_sent_again_as_in_a_simulation(p: float, budget: float) -> None:
    owner_C = torch.arange(4).repeat_interleave(5000)
    masks = Masks(Bernoulli(p=p), 4, owner_C, seed=3)
    retransmitted = [arrived(masks, Reliability(budget=budget), up=True).retransmitted for _ in range(4)]
    share = sum(retransmitted) / len(retransmitted) / (3 * 5000 * 4)
    # A round leaves just about the budget in some messages and more in others, which ask once more.
    assert share == pytest.approx(theory.sent_again(p, 5000, budget)[0], abs=0.02)


@pytest.mark.parametrize("name", ["lab-drift-400mbit-loss10", "lab-drift-100mbit-40ms-loss10"])
def test_steps_in_the_lab_took_little_longer(name: str) -> None:
    kept = json.loads((BENCHMARKS / f"{name}.json").read_text())
    conditions, asked = kept["conditions"], kept["conditions"]["requested"]
    line = theory.Bottleneck(bits_per_s=asked["rate_bits_per_s"], round_trip_s=asked["round_trip_s"])
    bits = {"storm-drift": 32.0, "storm-drift-bf16": 16.0, "storm-drift-int8": 8.1}
    ratios = [
        run["median_s"]
        / theory.step_on_bottleneck_s(
            line,
            n=conditions["hosts"],
            model_bytes=conditions["params"] * bits[run["backend"]] / 8,
            p=asked["loss"],
            compute_s=conditions["no_sync_s"],
        )
        for run in kept["results"]
        if run["backend"] in bits
    ]
    assert len(ratios) >= 2
    assert all(1.05 < ratio < 1.25 for ratio in ratios), ratios


def test_bad_lines_and_budgets_are_refused() -> None:
    with pytest.raises(ValueError, match="bits_per_s must be above 0, got 0"):
        theory.Bottleneck(bits_per_s=0.0, round_trip_s=0.1)
    with pytest.raises(ValueError, match="round_trip_s"):
        theory.Bottleneck(bits_per_s=1.0, round_trip_s=-0.1)
    with pytest.raises(ValueError, match=r"budgets must lie in \[0, 1\], got 2"):
        theory.step_on_bottleneck_s(LINE, n=4, model_bytes=1.0, p=0.1, budgets=(1.0, 2.0))
    with pytest.raises(ValueError, match="redundancy"):
        theory.step_on_bottleneck_s(LINE, n=4, model_bytes=1.0, p=0.1, redundancy=-1.0)

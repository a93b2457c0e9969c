# mypy: disable-error-code="no-untyped-call"
# torch's own backward is untyped.
"""Training under packet loss, on the simulated network: it ends about where lossless runs do, as the ledger shows."""

import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from stormtorch import (
    EXACT,
    LOSSY,
    BoundedDrift,
    GradientAveraging,
    ModelAveraging,
    Options,
    Reliability,
    exact,
    theory,
)
from stormtorch.policies.policy import Policy
from stormtorch.telemetry.statistics import mean
from training import (
    Rank,
    Vector,
    adamw,
    assert_same,
    on_ranks,
    perceptron,
    regression,
    trained,
    values,
    vectors,
)

pytestmark = pytest.mark.pure

SMALL: dict[str, Any] = {"options": Options(datagram_bytes=400)}


@pytest.mark.thorough
@pytest.mark.parametrize("p", [0.1, 0.3])
def test_replicas_differ_and_are_the_same_within_exact(p: float) -> None:
    def work(rank: Rank) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        rank.train(20)
        rank.model(vectors(0, 0))  # waits for all parameters in flight
        stale = values(rank.model)
        with exact(rank.model):
            return stale, values(rank.model)

    found = on_ranks(perceptron(inside=100), adamw, work, policy=BoundedDrift(), loss=p, **SMALL)
    assert any(not torch.equal(one, other) for one, other in zip(found[0][0], found[1][0], strict=True))
    for _, ours in found[1:]:
        assert_same(ours, found[0][1])


@functools.cache
def final_loss(policy: Policy, p: float, steps: int = 60) -> float:
    alone = perceptron(inside=100)
    found = trained(alone, adamw, steps, policy=policy, loss=p, **SMALL)[0]
    with torch.no_grad():
        for parameter, value in zip(alone.parameters(), found, strict=True):
            parameter.copy_(value)
        return mean([regression(alone, vectors(99, step, size=64)).item() for step in range(5)])


VARIANTS: dict[str, Policy] = {
    "plain": BoundedDrift(lead=0.0),
    "lead": BoundedDrift(),
    "bfloat16": BoundedDrift(wire=torch.bfloat16),
    "int8": BoundedDrift(wire=torch.int8),
    "int4": BoundedDrift(wire=torch.int4),  # type: ignore[attr-defined]
    "horvitz-thompson": BoundedDrift(weights="horvitz-thompson"),
    "horvitz-thompson in int8": BoundedDrift(weights="horvitz-thompson", wire=torch.int8),
    "bounded": BoundedDrift(max_lag=2, wire=torch.bfloat16),
    "by parameters": BoundedDrift(ownership="parameters"),
    "small buckets": BoundedDrift(bucket_mb=1e-3),
    "model averaging": ModelAveraging(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(VARIANTS))
def test_training_under_loss_ends_about_where_it_ends_without(name: str) -> None:
    untrained, lossless = final_loss(BoundedDrift(), 0.0, steps=0), final_loss(BoundedDrift(), 0.0)
    assert lossless < 0.6 * untrained
    assert final_loss(VARIANTS[name], 0.2) == pytest.approx(lossless, rel=0.1)


@pytest.mark.thorough
def test_horvitz_thompson_gives_every_rank_the_same_weight() -> None:
    """Only rank 3 has a gradient of 1, so the mean is 1/4. On average, loss must not change that."""

    def work(rank: Rank) -> float:
        seen = []
        for _ in range(60):
            (rank.model.numbers.sum() * (1.0 if rank.rank == 3 else 0.0)).backward()
            owned = [each.grad for each in rank.optimizer.param_groups[0]["params"] if each.grad is not None]
            seen.append(torch.cat([each.flatten() for each in owned]).mean().item())
            rank.optimizer.step()
            rank.optimizer.zero_grad()
        return mean(seen[20:])

    make = lambda model: torch.optim.SGD(model.parameters(), lr=0.0)  # noqa: E731
    policy = BoundedDrift(weights="horvitz-thompson", guard=None)
    assert on_ranks(Vector(6000), make, work, policy=policy, loss=0.3, **SMALL) == pytest.approx([0.25] * 4, rel=0.1)
    # The plain mean weighs the owner's own gradients more than the others'.
    owners = on_ranks(Vector(6000), make, work, policy=BoundedDrift(guard=None), loss=0.3, **SMALL)
    assert owners[3] == pytest.approx(theory.mean_inverse_count(0.3, 4), rel=0.1)
    assert owners[0] < 0.95 * 0.25


def apart(policy: Policy, steps: int) -> float:
    """The variance of replicas where only the exchange brings them together."""

    def noise(rank: int, step: int) -> torch.Tensor:
        return torch.randn(6000, generator=torch.Generator().manual_seed(1000 * step + rank))

    def work(rank: Rank) -> torch.Tensor:
        rank.train(steps, objective=lambda model, given: model(given), data=noise)
        rank.model(torch.ones(1))
        return values(rank.model)[0]

    make = lambda model: torch.optim.SGD(model.parameters(), lr=1.0)  # noqa: E731
    found = torch.stack(on_ranks(Vector(6000), make, work, policy=policy, loss=0.3, **SMALL))
    return float((found - found.mean(0)).square().mean())


@pytest.mark.thorough
def test_models_that_are_averaged_stay_together_and_gradients_that_are_do_not_keep_them_so() -> None:
    averaged = [apart(ModelAveraging(), steps) for steps in (10, 50)]
    gradients = [apart(GradientAveraging(), steps) for steps in (10, 50)]
    assert averaged[1] < 1.5 * averaged[0]
    assert gradients[1] == pytest.approx(5.0 * gradients[0], rel=0.25)
    assert gradients[1] > 10.0 * averaged[1]


@pytest.mark.thorough
@pytest.mark.parametrize("gradients", [LOSSY, EXACT], ids=["lossy", "exact"])
def test_the_guard_holds_as_long_as_too_much_is_lost(gradients: Reliability) -> None:
    def work(rank: Rank) -> list[bool]:
        rank.train(60)
        rank.values()
        return [row.guarded for row in rank.optimizer.ledger]

    policy = BoundedDrift(gradients=gradients, guard=0.3)
    for guarded in on_ranks(perceptron(inside=200), adamw, work, policy=policy, loss=0.45, **SMALL):
        assert not guarded[0]
        assert all(guarded[4:])


# --- the ledger -------------------------------------------------------------------------------------------------------


class Writer:
    """Replaces torch's SummaryWriter."""

    def __init__(self) -> None:
        self.scalars: dict[tuple[str, int], float] = {}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars[name, step] = value

    def add_text(self, name: str, text: str, step: int) -> None:
        raise AssertionError(text)


def test_the_ledger_is_written_as_json_lines_and_to_tensorboard(tmp_path: Path) -> None:
    def work(rank: Rank) -> None:
        writer, ledger = Writer(), rank.optimizer.ledger
        ledger.to_tensorboard(writer)
        ledger.follow(tmp_path / f"followed {rank.rank}")
        rank.train(12)
        rank.values()
        ledger.write(tmp_path / f"written {rank.rank}")
        lines = (tmp_path / f"written {rank.rank}").read_text().splitlines()
        assert lines == (tmp_path / f"followed {rank.rank}").read_text().splitlines()
        rows = [json.loads(line, parse_constant=lambda name: pytest.fail(name)) for line in lines]
        assert [row["step"] for row in rows] == list(range(12))
        assert ledger.summary()["steps"] == len(ledger) == 12
        for row in rows:
            assert set(row["broadcast"]) == set(row["gradients"]) == {str(peer) for peer in range(4)} - {str(rank.rank)}
            assert writer.scalars["storm/arrived", row["step"]] == row["arrived"]
            assert writer.scalars["storm/lead", row["step"]] == row["lead"]
            assert row["bytes_sent"] > 0
        assert all(math.isfinite(value) for value in writer.scalars.values())
        assert any(name == f"storm/broadcast/from_{(rank.rank + 1) % 4}" for name, _ in writer.scalars)

    on_ranks(perceptron(inside=100), adamw, work, policy=BoundedDrift(), loss=0.1, **SMALL)

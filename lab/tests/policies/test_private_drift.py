# mypy: disable-error-code="no-untyped-call"
# torch's own backward is untyped.
"""Noise on gradients: of the requested size, fresh and secret; none at zero."""

import copy
import math
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch

from stormtorch import EXACT, BoundedDrift, exact, prepare
from stormtorch.checks import BadSetting
from stormtorch.collectives import Group
from stormtorch.exchange.exchange import Transport
from stormtorch.exchange.simulated import SimulatedNetwork
from stormtorch.policies.policy import Policy
from stormtorch_lab import PrivateDrift, simulate
from training import Vector, adamw, assert_same, perceptron, trained

pytestmark = pytest.mark.pure

NOISY = PrivateDrift(noise=1.5, clip=0.2, batch=4, sharers=9)
SCALE = 1.5 * 0.2 / (4 * 3)


@pytest.mark.parametrize("weights", ["mean", "horvitz-thompson"])
@pytest.mark.parametrize("loss", [0.0, 0.2])
def test_without_noise_it_is_bounded_drift_bit_for_bit(weights: Any, loss: float) -> None:
    def found(policy: Policy) -> list[list[torch.Tensor]]:
        return trained(perceptron(inside=200), adamw, 8, policy=policy, world=3, loss=loss, seed=4)

    private = found(PrivateDrift(weights=weights, clip=math.inf))
    for ours, theirs in zip(private, found(BoundedDrift(weights=weights)), strict=True):
        assert_same(ours, theirs)


def test_noise_has_the_scale_of_one_sharer_and_is_new_each_time() -> None:
    own = torch.full((40, 500), 3.0)
    first, second = NOISY.send(own, 0.0), NOISY.send(own, 0.0)
    assert torch.equal(own, torch.full_like(own, 3.0))
    for sent in (first, second, first - second + 3.0):
        assert float(sent.mean()) == pytest.approx(3.0, abs=5 * SCALE / math.sqrt(20_000) * 1.5)
    assert float(first.std()) == pytest.approx(SCALE, rel=0.03)
    assert float((first - second).std()) == pytest.approx(SCALE * math.sqrt(2.0), rel=0.03)


def test_copies_of_a_policy_draw_noise_of_their_own() -> None:
    own = torch.zeros(1, 100)
    NOISY.send(own, 0.0)
    copies = [NOISY, replace(NOISY), copy.deepcopy(NOISY), pickle.loads(pickle.dumps(NOISY))]
    drawn = [each.send(own, 0.0) for each in copies]
    assert all(each == NOISY for each in copies)
    assert all(not torch.equal(one, other) for place, one in enumerate(drawn) for other in drawn[:place])
    seeded = [replace(NOISY, seed=7).send(own, 0.0) for _ in range(2)]
    assert torch.equal(*seeded)


def test_weighed_gradients_carry_weighed_noise() -> None:
    own = torch.ones(10, 4000)
    sent = PrivateDrift(noise=1.0, clip=1.0, weights="horvitz-thompson").send(own, 0.5)
    assert float(sent.mean()) == pytest.approx(2.0, abs=0.05)
    assert float(sent.std()) == pytest.approx(2.0, rel=0.03)


def test_noise_does_not_change_how_what_arrived_is_weighed() -> None:
    mean = torch.ones(3, 4)
    count = torch.tensor([[1.0], [2.0], [4.0]])
    assert torch.equal(NOISY.combine(mean.clone(), count, 4), mean)
    weighed = replace(NOISY, weights="horvitz-thompson").combine(mean.clone(), count, 4)
    assert torch.equal(weighed, mean * count / 4)


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
def test_the_mean_of_all_ranks_has_the_noise_that_was_asked_for(wire: torch.dtype) -> None:
    world, count = 4, 20_000
    policy = PrivateDrift(noise=2.0, clip=0.5, batch=8, sharers=world, reliability=EXACT, wire=wire)

    def work(transport: Transport) -> torch.Tensor:
        model = Vector(count)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        prepare(model, optimizer, policy=policy, group=Group(transport))
        model(torch.ones(count)).backward()
        optimizer.step()
        with exact(model):
            return model.numbers.detach().clone()

    found = SimulatedNetwork(world, seed=1).run(work)
    for each in found:
        assert torch.equal(each, found[0])
    # Of the sum over all samples, as a standard deviation.
    noise = (found[0] + 1.0) * world * 8
    assert float(noise.std()) == pytest.approx(2.0 * 0.5, rel=0.04)


def test_virtual_workers_add_noise_that_a_seed_repeats() -> None:
    def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(batch)
        return found

    def moved(seed: int) -> float:
        seen: list[torch.Tensor] = []

        def look(model: Any) -> tuple[float, float]:
            seen.append(model.numbers.detach().clone())
            return 0.0, 0.0

        simulate(
            Vector(20_000),
            loss,
            lambda _step, first, last: torch.zeros(last - first, 20_000),
            lambda parameters: torch.optim.SGD(parameters, lr=1.0),
            workers=8,
            steps=1,
            policy=PrivateDrift(noise=1.0, clip=1.0, sharers=8, seed=seed),
            evaluate=look,
        )
        return float(seen[-1].std())

    assert moved(1) == moved(1) != moved(2)
    assert moved(1) == pytest.approx(1.0 / 8, rel=0.04)


@pytest.mark.parametrize(
    "name, settings",
    [
        ("noise", {"noise": -1.0}),
        ("clip", {"clip": 0.0}),
        ("clip", {"noise": 1.0}),
        ("batch", {"batch": 0}),
        ("sharers", {"sharers": 0}),
        ("overlap", {"noise": 1.0, "clip": 1.0, "overlap": True}),
        ("deadline", {"noise": 1.0, "clip": 1.0, "deadline": "auto"}),
    ],
)
def test_what_is_no_setting_is_refused_by_name(name: str, settings: dict[str, Any]) -> None:
    with pytest.raises(BadSetting, match=f"^{name} must"):
        PrivateDrift(**settings)

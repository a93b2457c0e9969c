# mypy: disable-error-code="no-untyped-call"
# torch's own backward is untyped.
"""Ranks with models of their own, when some skip a step, do not use a parameter, or die."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import nn

from stormtorch import BoundedDrift, GradientAveraging, ModelAveraging, Policy, RankPolicy, exact, prepare
from stormtorch.collectives import Group
from stormtorch.collectives.wire import WIRES
from stormtorch.exchange.exchange import Transport
from stormtorch.exchange.simulated import SimulatedNetwork
from stormtorch.policies import rules
from training import perceptron, regression, vectors

pytestmark = pytest.mark.pure

Work = Callable[[Any, nn.Module, Any], Any]


def run(ranks: int, policy: Policy, work: Work, model: nn.Module, lr: float = 0.05, **network: Any) -> list[Any]:
    models = [copy.deepcopy(model) for _ in range(ranks)]

    def body(transport: Transport) -> Any:
        mine = models[transport.rank]
        optimizer = torch.optim.SGD(mine.parameters(), lr=lr)
        prepare(mine, optimizer, policy=policy, group=Group(transport, range(ranks)))
        return work(transport, mine, optimizer)

    return SimulatedNetwork(ranks, **({"seed": 1} | network)).run(body)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_rank_that_alone_skips_a_step_is_not_taken_for_missing(seed: int) -> None:
    def work(transport: Transport, model: nn.Module, optimizer: Any) -> list[int]:
        for step in range(6):
            regression(model, vectors(transport.rank, step)).backward()
            if (step, transport.rank) != (2, 1):
                optimizer.step()
            optimizer.zero_grad()
        assert all(row.missing == [] for row in optimizer.ledger)
        return [row.step for row in optimizer.ledger]

    found = run(4, GradientAveraging(give_up_s=5.0), work, perceptron(), loss=0.3, seed=seed)
    assert found == [list(range(6)), list(range(5)), list(range(6)), list(range(6))]


@dataclass(frozen=True, kw_only=True)
class Turning(RankPolicy):
    sends: ClassVar[Literal["gradients", "parameters"]] = "gradients"

    def order(self, ranks: int, random: torch.Generator) -> list[int]:
        return rules.block_order(ranks, random)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 6000, bias=False)
        self.second = nn.Linear(8, 7000, bias=False)


def test_owners_are_the_same_on_all_ranks_though_buckets_begin_in_another_order() -> None:
    weights = torch.arange(6000.0) / 6000

    def work(transport: Transport, model: Any, _optimizer: Any) -> torch.Tensor:
        given = torch.ones(1, 8)
        loss = (model.first(given) * weights).sum()
        if transport.rank:
            loss = loss + model.second(given).sum()
        ((transport.rank + 1) * loss).backward()
        found: torch.Tensor = model.first.weight.grad[:, 0]
        return found.clone()

    for gradient in run(4, Turning(bucket_mb=1e-5), work, Two()):
        torch.testing.assert_close(gradient, 2.5 * weights)


class Ones(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = nn.Parameter(torch.ones(2000))


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("wire", WIRES)
def test_updates_below_the_rounding_of_the_wire_are_not_lost(ranks: int, wire: torch.dtype) -> None:
    def work(_transport: Transport, model: Any, optimizer: Any) -> float:
        for _ in range(50):
            model.numbers.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return float(model.numbers.detach().mean())

    assert run(ranks, ModelAveraging(wire=wire), work, Ones(), lr=1e-3) == [pytest.approx(0.95, rel=1e-4)] * ranks


@pytest.mark.parametrize("every, overlap", [(1, False), (2, True)])
def test_exact_is_the_mean_of_those_that_live(every: int, overlap: bool) -> None:
    def flat(model: nn.Module) -> torch.Tensor:
        return torch.cat([each.detach().flatten() for each in model.parameters()]).clone()

    def work(transport: Any, model: nn.Module, optimizer: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        for step in range(8):
            if step == 4 and transport.rank == 3:
                transport.network.set_unreachable(3, True)
                return None
            regression(model, vectors(transport.rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        with exact(model):
            seen = flat(model)
        return flat(model), seen

    policy = ModelAveraging(every=every, overlap=overlap, collective_wait_s=50.0)
    living = run(4, policy, work, perceptron())[:3]
    mean = torch.stack([own for own, _ in living]).mean(0)
    for _, seen in living:
        torch.testing.assert_close(seen, mean)
        assert torch.equal(seen, living[0][1])


@pytest.mark.parametrize(
    "policy", [ModelAveraging(overlap=True, bucket_mb=0.016), BoundedDrift(overlap=True, bucket_mb=0.016)]
)
def test_a_module_waits_for_its_own_parameters_alone(policy: Policy) -> None:
    def work(transport: Any, model: Any, optimizer: Any) -> list[float]:
        given = torch.ones(1, 64)
        model(given).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        times: list[float] = []
        for layer in model:
            layer.register_forward_hook(lambda *_: times.append(transport.network.now_s))
        model(given)
        return times

    torch.manual_seed(0)
    for times in run(2, policy, work, nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))), rate="100mbit"):
        assert times == sorted(times)
        assert times[0] < times[2] < times[5]

# mypy: disable-error-code="no-untyped-call"
# torch's own backward is untyped.
"""Ranks that die and rejoin while the others continue training."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import store_of_threads
from torch import nn

from stormtorch import BoundedDrift, GradientAveraging, ModelAveraging, Options, StormError, connect, exact, prepare
from stormtorch.collectives import Group
from stormtorch.exchange.exchange import Transport
from stormtorch.exchange.simulated import SimulatedNetwork
from stormtorch.policies.policy import Policy
from stormtorch.runtime.members.hyperparameters import Hyperparameters
from stormtorch.udp.udp import UdpTransport
from training import Vector

OPTIONS = Options(silence_s=1.0, timeout_s=30.0, linger_s=0.2)
RETURNING = replace(OPTIONS, rejoin=True)
WORLD = 4
DRIFT = BoundedDrift(give_up_s=20.0)


class Numbers(nn.Module):
    """More parameters than one trip to all ranks carries, and a buffer that counts."""

    def __init__(self, value: float, count: int) -> None:
        super().__init__()
        self.numbers = nn.Parameter(torch.full((100_000,), value))
        self.count: torch.Tensor
        self.register_buffer("count", torch.tensor(count))

    def forward(self) -> torch.Tensor:
        return self.numbers.sum()


def prepared(
    transport: UdpTransport, model: nn.Module, lr: float = 0.0, policy: Policy = DRIFT
) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    prepare(model, optimizer, policy=policy, group=Group(transport, range(WORLD)))
    return optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model().backward()
    optimizer.step()
    optimizer.zero_grad()


def in_threads(works: list[Callable[[], None]], within_s: float = 40.0) -> None:
    errors: list[BaseException] = []

    def body(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(work,), daemon=True) for work in works]
    for each in threads:
        each.start()
    end = time.monotonic() + within_s
    for each in threads:
        each.join(max(end - time.monotonic(), 0.0))
    if errors:
        raise errors[0]
    assert not any(each.is_alive() for each in threads), "a rank hangs"


@pytest.mark.thorough
@pytest.mark.parametrize(
    "policy",
    [
        DRIFT,
        ModelAveraging(give_up_s=20.0, settings="same"),
        ModelAveraging(give_up_s=20.0, settings="same", every=2, wire=torch.bfloat16, overlap=True),
        GradientAveraging(give_up_s=20.0, settings="same"),
    ],
    ids=["drift", "models", "models every second step", "gradients"],
)
def test_a_rank_returns_while_another_is_dead(policy: Policy) -> None:
    store = store_of_threads()
    found: dict[int, tuple[torch.Tensor, int, Any]] = {}
    events: dict[int, list[str]] = {}

    def live(transport: UdpTransport, model: Numbers, optimizer: Any) -> None:
        while optimizer.session.view.members != (0, 1, 2):
            step(model, optimizer)
            time.sleep(0.01)
        until = optimizer.session.view.step + 6
        while optimizer.session.steps < until:
            step(model, optimizer)
        with exact(model):
            found[transport.rank] = (model.numbers.detach().clone(), int(model.count), optimizer.session.view)
        events[transport.rank] = [event for row in optimizer.ledger for event in row.events]
        transport.drain()
        transport.close()

    def first(rank: int) -> None:
        transport = connect(store, rank, WORLD, OPTIONS)
        model = Numbers(1.0, 7)
        optimizer = prepared(transport, model, policy=policy)
        for _ in range(2):
            step(model, optimizer)
        with exact(model):
            pass
        if rank < 2:
            live(transport, model, optimizer)
            return
        transport.close(0.2)
        if rank == 2:
            again()

    def again() -> None:
        transport = connect(store, 2, WORLD, RETURNING)
        model = Numbers(0.0, 0)
        optimizer = prepared(transport, model, lr=7.0, policy=policy)
        assert optimizer.param_groups[0]["lr"] == 0.0  # as on the other ranks, which may have changed it
        live(transport, model, optimizer)

    in_threads([lambda rank=rank: first(rank) for rank in range(WORLD)])  # type: ignore[misc]
    assert len({(view.number, view.step) for *_, view in found.values()}) == 1
    for rank in range(2):
        assert any("rank 2 is new" in event or "rank 2 is back" in event for event in events[rank]), events
        assert any("3" in event.partition("rank")[2] and "gone" in event for event in events[rank]), events
    for rank in range(3):
        numbers, count, _ = found[rank]
        assert torch.equal(numbers, torch.ones(100_000)), (
            f"rank {rank}: {int((numbers != 1).sum())} were not handed over"
        )
        assert count == 7


def test_a_rank_that_dies_while_it_returns_does_not_end_the_job_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of_threads()
    ended: list[int] = []
    died = threading.Event()
    take = Hyperparameters.take

    def die(self: Hyperparameters, group: Group, root: int, *, new: bool) -> None:
        if new:
            group.transport.close(0.2)  # type: ignore[call-arg]  # it is one over UDP
            died.set()
            raise StormError("dies here")
        take(self, group, root, new=new)

    monkeypatch.setattr(Hyperparameters, "take", die)

    def first(rank: int) -> None:
        transport = connect(store, rank, WORLD, OPTIONS)
        model = Vector(400)
        optimizer: Any = prepared(transport, model)
        session = optimizer.session

        def step() -> None:
            model(torch.ones(400)).backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.01)

        step()
        with exact(model):
            pass
        if rank == 2:
            transport.close(0.2)
            with pytest.raises(StormError, match="dies here"):
                prepared(connect(store, 2, WORLD, RETURNING), Vector(400))
            return
        while not (died.is_set() and session.view.number > 2 and session.view.members == (0, 1, 3)):
            step()
        until = session.view.step + 6
        while session.steps < until:
            step()
        # Different settings are still detected.
        if rank == 1:
            optimizer.param_groups[0]["lr"] = 3.0
        with pytest.raises(ValueError, match=r"lr of parameter group 0 is 0\.0 on ranks 0 and 3, 3\.0 on rank 1"):
            step()
        ended.append(rank)
        transport.close()

    in_threads([lambda rank=rank: first(rank) for rank in range(WORLD)])  # type: ignore[misc]
    assert sorted(ended) == [0, 1, 3]


@pytest.mark.thorough
@pytest.mark.parametrize("weights", ["mean", "horvitz-thompson"])
def test_a_rank_that_is_missing_does_not_shrink_the_gradient(weights: Any) -> None:
    network = SimulatedNetwork(WORLD, seed=1)
    models = [Vector(400) for _ in range(WORLD)]

    def body(transport: Transport) -> torch.Tensor:
        model = models[transport.rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        prepare(model, optimizer, policy=BoundedDrift(weights=weights), group=Group(transport, range(WORLD)))
        for number in range(6):
            if number == 2 and transport.rank == 3:
                network.set_unreachable(3, True)
                break
            model(torch.ones(400)).backward()
            optimizer.step()
            optimizer.zero_grad()
        own: torch.Tensor = optimizer.param_groups[0]["params"][0]
        return own.detach()

    for own in network.run(body)[:3]:
        # Except for the step in which it became silent.
        assert own.mean() <= -5.7

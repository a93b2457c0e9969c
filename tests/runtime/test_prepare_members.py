# mypy: disable-error-code="no-untyped-call"
# torch's own backward is untyped.
"""Ranks that die and return while the others train on."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import store_of_threads
from torch import nn

from stormtorch import BoundedDrift, GradientAveraging, ModelAveraging, Options, StormError, connect, exact, prepare
from stormtorch.collectives import Group
from stormtorch.policies.policy import Policy
from stormtorch.runtime.hyperparameters import Hyperparameters
from stormtorch.transport.exchange import Transport
from stormtorch.transport.rendezvous import rejoin
from stormtorch.transport.simulated import SimulatedNetwork
from stormtorch.transport.udp import UdpTransport
from training import Vector

OPTIONS = Options(silence_s=1.0, timeout_s=30.0, linger_s=0.2)
WORLD = 4
DRIFT = BoundedDrift(give_up_s=20.0)


class Numbers(nn.Module):
    """More of them than go to everyone in one trip, and a count."""

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
def test_a_rank_returns_while_another_is_dead(tmp_path: Path, policy: Policy) -> None:
    store = store_of_threads()
    done = threading.Event()
    found: dict[int, tuple[torch.Tensor, int]] = {}

    def live(rank: int, transport: UdpTransport, model: Numbers, optimizer: torch.optim.Optimizer) -> None:
        optimizer.ledger.follow(tmp_path / str(rank))  # type: ignore[attr-defined]
        # As many steps for everyone from the epoch on, which all know.
        while not any("returns" in event for row in optimizer.ledger for event in row.events):  # type: ignore[attr-defined]
            step(model, optimizer)
            time.sleep(0.01)
        finish(rank, model)

    def finish(rank: int, model: Numbers) -> None:
        with exact(model):
            found[rank] = (model.numbers.detach().clone(), int(model.count))

    def first(rank: int) -> None:
        transport = connect(store, rank, WORLD, OPTIONS)
        model = Numbers(1.0, 7)
        optimizer = prepared(transport, model, policy=policy)
        for _ in range(2):
            step(model, optimizer)
        if rank >= 2:
            with exact(model):
                pass
            transport.close(0.2)
            if rank == 2:
                again()
            return
        with exact(model):
            pass
        live(rank, transport, model, optimizer)
        done.wait(5.0)
        transport.close()

    def again() -> None:
        transport = rejoin(store, 2, WORLD, OPTIONS)
        model = Numbers(0.0, 0)
        optimizer = prepared(transport, model, lr=7.0, policy=policy)
        assert optimizer.param_groups[0]["lr"] == 0.0  # as of the others, who may have changed it since they began
        finish(2, model)
        done.set()
        transport.close()

    in_threads([lambda rank=rank: first(rank) for rank in range(WORLD)])  # type: ignore[misc]
    for rank in range(2):
        told = [json.loads(line) for line in (tmp_path / str(rank)).read_text().splitlines()]
        (event,) = [event for row in told for event in row["events"] if "epoch" in event]
        assert event == f"epoch 1 begins at step {told[-1]['step'] + 1}: rank 2 as a new process returns"
    for rank in range(3):
        numbers, count = found[rank]
        assert torch.equal(numbers, torch.ones(100_000)), (
            f"rank {rank}: {int((numbers != 1).sum())} were not handed over"
        )
        assert count == 7


def test_a_rank_that_dies_while_it_returns_does_not_end_the_job_of_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = store_of_threads()
    ended: list[int] = []
    take = Hyperparameters.take

    def die(self: Hyperparameters, group: Group, root: int, *, new: bool) -> None:
        if new:
            group.transport.close(0.2)  # type: ignore[call-arg]  # it is one over UDP
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
                prepared(rejoin(store, 2, WORLD, OPTIONS), Vector(400))
            return
        while not session._rounds.members.epoch:
            step()
        for _ in range(5):
            step()
        # Settings that differ are found all the same.
        if rank == 1:
            optimizer.param_groups[0]["lr"] = 3.0
        with pytest.raises(ValueError, match=r"lr of parameter group 0 is 0\.0 on ranks 0 and 3, 3\.0 on rank 1"):
            step()
        ended.append(rank)
        transport.close()

    in_threads([lambda rank=rank: first(rank) for rank in range(WORLD)])  # type: ignore[misc]
    assert sorted(ended) == [0, 1, 3]
    told = [each for each in caplog.messages if "cannot hand over optimizer settings" in each]
    assert len(told) == 3
    assert all("training goes on" in each for each in told)


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
                network.set_dark(3, True)
                break
            model(torch.ones(400)).backward()
            optimizer.step()
            optimizer.zero_grad()
        own: torch.Tensor = optimizer.param_groups[0]["params"][0]
        return own.detach()

    for own in network.run(body)[:3]:
        # But for the step in which it fell silent.
        assert own.mean() <= -5.7

"""Incarnations beyond 16 bits, and ranks whose host gets another address."""

import subprocess
import time
from typing import Any

import pytest
import torch
from torch import nn

from pause_after_kill import job
from returning import with_a_rank_that_returns
from stormtorch import BoundedDrift, prepare
from stormtorch.collectives import Group
from stormtorch.joining.admission import AdmissionService
from stormtorch_lab.netns import Lab
from stormtorch_lab.netns.fixtures import lab_or_skip
from stormtorch_lab.netns.links.kernel_network import DEVICE, address


def test_rank_returns_after_more_than_65535_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    give = AdmissionService._reserve
    monkeypatch.setattr(
        AdmissionService, "_reserve", lambda self, on, slot, above: give(self, on, slot, max(above, 70_000))
    )
    seen: list[int] = []

    def begin(transport: Any, _again: bool) -> tuple[nn.Module, Any]:
        if transport.rank == 2:
            seen.append(transport.incarnation(2))
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        return prepare(model, optimizer, policy=BoundedDrift(), group=Group(transport))

    def step(model: nn.Module, optimizer: Any) -> None:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    found = with_a_rank_that_returns(begin, step, lambda model: [each.tolist() for each in model.parameters()])
    assert found[0] == found[1] == found[2]
    assert seen[0] == 0 and seen[1] > 70_000


@pytest.mark.slow
@pytest.mark.lab
def test_rank_whose_host_gets_another_address_goes_on_from_there() -> None:
    lab_or_skip()
    with Lab(3) as network, job(3, network) as running:
        found = f"set -- $(ip -o -4 addr show dev {DEVICE})"
        words = f"{found}; ip addr del $4 dev {DEVICE} && ip addr add {address(77)}/${{4#*/}} dev {DEVICE}"
        changed = network.start(1, ["sh", "-c", words], stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True)
        said, _ = changed.communicate(timeout=30)
        assert changed.returncode == 0, said
        at = time.monotonic() + 2.0
        running.wait_for(lambda: all(running.steps(rank)[-1] > at for rank in range(3)), 40.0)
        assert [running.view(rank) for rank in range(3)] == [1] * 3

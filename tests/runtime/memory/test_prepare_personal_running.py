# mypy: disable-error-code="no-untyped-call, attr-defined"
# torch's own backward is untyped, and a prepared optimizer has more than torch's.
"""Personal parts of a model in real time: a process joins, and a rank is slow."""

import time
from typing import Any

import pytest
import torch
from conftest import local_world
from test_prepare_personal import WORLD, Body, train
from torch import nn

from returning import with_a_rank_that_returns
from stormtorch import BoundedDrift, GradientAveraging, ModelAveraging, Policy, exact, prepare
from stormtorch.collectives import Group
from stormtorch.exchange.exchange import Transport
from training import assert_same, values


@pytest.mark.parametrize(
    "policy", [BoundedDrift(give_up_s=20.0), ModelAveraging(give_up_s=20.0), GradientAveraging(give_up_s=20.0)]
)
def test_a_process_that_joins_gets_the_body_and_keeps_its_own_head(policy: Policy) -> None:
    def begin(transport: Transport, again: bool) -> tuple[Any, Any]:
        model = Body(transport.rank)
        with torch.no_grad():
            for each in (*model.parameters(), *model.buffers()):
                each.fill_(7.0 if again else 1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        return prepare(model, optimizer, policy=policy, personal=[model.head], group=Group(transport))

    found = with_a_rank_that_returns(
        begin,
        lambda model, optimizer: train(model, optimizer, 0, range(1)),
        lambda model: [*values(model.body), *values(model.head)],
    )
    for own, head in zip(found, (1.0, 1.0, 7.0), strict=True):
        assert_same(own[:4], [torch.ones_like(each) for each in own[:4]])
        assert_same(own[4:], [torch.full_like(each, head) for each in own[4:]])


@pytest.mark.thorough
def test_a_slow_rank_moves_its_head_once_for_each_of_its_own_backwards() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.common, self.own = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(2))

        def forward(self) -> torch.Tensor:
            return self.common.sum() + self.own.sum()

    def work(transport: Transport) -> tuple[int, int, float, bool]:
        model = Two()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
        policy = BoundedDrift(deadline="auto", bucket_mb=1e-4)
        prepare(model, optimizer, policy=policy, personal=[model.own], group=Group(transport))
        backwards, changed = 0, False
        while optimizer.session.steps < 60:
            optimizer.zero_grad()
            loss, before = model(), model.own.detach().clone()
            time.sleep(0.15 if transport.rank == 3 else 0.02)
            changed = changed or not torch.equal(before, model.own)
            loss.backward()
            optimizer.step()
            backwards += 1
        with exact(model):
            return backwards, optimizer.session.steps, -float(model.own[0].detach()), changed

    found = local_world(WORLD, work)
    assert found[3][0] < 60
    for backwards, _, moved, changed in found:
        assert moved == backwards
        assert not changed

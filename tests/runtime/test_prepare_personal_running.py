# mypy: disable-error-code="no-untyped-call, attr-defined"
# torch's own backward is untyped, and a prepared optimizer has more than torch's.
"""Personal parts of a model in real time: a process joins, and a rank is slow."""

import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import local_world, store_of_threads
from test_prepare_personal import WORLD, Body, train
from torch import nn

import stormtorch
from stormtorch import BoundedDrift, GradientAveraging, ModelAveraging, Policy, connect, exact, prepare
from stormtorch.collectives import Group
from stormtorch.transport.exchange import Transport
from training import assert_same, values


@pytest.mark.parametrize(
    "policy", [BoundedDrift(give_up_s=20.0), ModelAveraging(give_up_s=20.0), GradientAveraging(give_up_s=20.0)]
)
def test_a_process_that_joins_gets_the_body_and_keeps_its_own_head(policy: Policy) -> None:
    options = stormtorch.Options(silence_s=1.0, timeout_s=30.0, linger_s=0.2)
    store = store_of_threads()
    found: dict[int, list[torch.Tensor]] = {}
    errors: list[BaseException] = []

    def model_of(rank: int, value: float) -> Any:
        model = Body(rank)
        with torch.no_grad():
            for each in (*model.parameters(), *model.buffers()):
                each.fill_(value)
        return model

    def take_part(rank: int) -> None:
        try:
            transport = connect(store, rank, 3, options)
            model = model_of(rank, 1.0)
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.0)
            prepare(model, optimizer, policy=policy, personal=[model.head], group=Group(transport))
            train(model, optimizer, rank, range(2))
            if rank == 2:
                transport.close(0.2)
                transport = connect(store, rank, 3, replace(options, rejoin=True))
                model = model_of(rank, 7.0)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
                prepare(model, optimizer, policy=policy, personal=[model.head], group=Group(transport))
            else:
                while optimizer.session.view.number == 1 or len(optimizer.session.view.members) < 3:
                    train(model, optimizer, rank, range(1))
                    time.sleep(0.01)
            until = optimizer.session.view.step + 4
            while optimizer.session.steps < until:
                train(model, optimizer, rank, range(1))
            with exact(model):
                found[rank] = [*values(model.body), *values(model.head)]
            transport.part()
            transport.close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=take_part, args=(rank,), daemon=True) for rank in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(40.0)
    if errors:
        raise errors[0]
    for rank, head in ((0, 1.0), (2, 7.0)):
        body, own = found[rank][:4], found[rank][4:]
        assert_same(body, [torch.ones_like(each) for each in body])
        assert_same(own, [torch.full_like(each, head) for each in own])


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

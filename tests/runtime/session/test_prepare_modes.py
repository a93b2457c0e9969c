"""Optimizers with modes for training and evaluation: a rank dies while all ranks change the mode."""

from typing import Any

import pytest
import torch
from test_prepare_classes import ScheduleFree

from stormtorch import exact, prepare
from stormtorch.collectives import Group
from stormtorch.exchange.exchange import Transport
from stormtorch.exchange.simulated import SimulatedNetwork
from survey_cases import AT, Loop, Subject, judge
from training import perceptron, vectors
from views import EXACTLY

pytestmark = pytest.mark.pure


class Died(Exception):
    """The rank is dead: no rank receives anything from it."""


def die(c: Loop, *_: Any, **__: Any) -> None:
    """Makes the rank unreachable."""
    transport = c.optimizer.session.group.transport
    transport.network.set_unreachable(transport.rank, True)
    raise Died


def dying(c: Loop, when: str) -> None:
    """Makes rank 0 die when it next changes the mode."""
    session = c.optimizer.session
    if when == "before it has moved":
        session.moves = lambda _: die(c)
    elif when == "before it has met the others":
        channel = session.channel
        session.channel = lambda name, **how: die(c) if name.startswith("moves/") else channel(name, **how)
    else:
        session._full_state.gather_parameters = lambda _: die(c)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "when", ["before it has moved", "before it has met the others", "when it has met them and gives its shard"]
)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_rank_that_dies_while_all_change_the_mode_leaves_all_shards_in_the_new_one(mode: str, when: str) -> None:
    def step(c: Loop, number: int) -> None:
        dies = mode if c.members is None and c.rank == 0 and number == AT - 1 else ""
        c.backward(number)
        c.optimizer.step()
        c.optimizer.zero_grad()
        try:
            if dies == "eval":
                dying(c, when)
            c.optimizer.eval()
            with torch.no_grad():
                seen = c.model(vectors(9, 0)).sum()
            if dies == "train":
                dying(c, when)
            c.optimizer.train()
        except Died:
            return
        if number % 3 == 2:  # training depends on the result of this evaluation
            with torch.no_grad():
                next(c.model.parameters()).data.mul_(1 + 0.01 * seen.tanh())

    subject = Subject("schedule-free", lambda model: [ScheduleFree(model.parameters(), 0.1)], step)
    assert judge(subject, "one killed") == ("same bits", "")


class Swapping(torch.optim.SGD):
    """Has a method that moves parameters outside `step`, like Lookahead's `backup_and_load_cache`."""

    def swap(self) -> None:
        """Halves all parameters that it knows."""
        for group in self.param_groups:
            for each in group["params"]:
                each.data.mul_(0.5)


def test_what_another_method_does_to_parameters_is_there_within_exact() -> None:
    def work(transport: Transport) -> list[bool]:
        model = perceptron()
        optimizer: Any = Swapping(model.parameters(), lr=0.1)
        prepare(model, optimizer, policy=EXACTLY, group=Group(transport))
        model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
        with exact(model):
            before = [each.detach().clone() for each in model.parameters()]
        optimizer.swap()
        with exact(model):
            return [torch.equal(0.5 * one, each) for one, each in zip(before, model.parameters(), strict=True)]

    assert SimulatedNetwork(3).run(work) == [[True] * 4] * 3

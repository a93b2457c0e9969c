# mypy: disable-error-code="no-untyped-call"
# torch's own backward is untyped.
"""Ranks of a simulated network that die, are cut off and come back, and a reference in one process."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from stormtorch import EXACT, BoundedDrift, Options, exact, prepare
from stormtorch.collectives import Group
from stormtorch.exchange.simulated import SimulatedNetwork, SimulatedTransport
from stormtorch.policies.policy import Policy
from training import (
    Loss,
    MakeOptimizer,
    Optimizer,
    mean_gradients,
    mean_in_float32,
    perceptron,
    plain_step,
    regression,
    values,
    vectors,
)

T = TypeVar("T")
OPTIONS = Options(datagram_bytes=1472, silence_s=2.0)
# Several buckets, so that shards of several kinds move.
EXACTLY = BoundedDrift(reliability=EXACT, bucket_mb=5e-4)
DYING = Mapping[int, int]
"""Steps before which ranks go dark for good, by rank."""


@dataclass
class Member:
    """What a rank of a test has."""

    rank: int
    network: SimulatedNetwork
    transport: SimulatedTransport
    model: Any
    optimizer: Any

    @property
    def session(self) -> Any:
        return self.optimizer.session

    def step(
        self,
        number: int,
        *,
        objective: Loss = regression,
        data: Callable[[int, int], torch.Tensor] = vectors,
    ) -> None:
        objective(self.model, data(self.rank, number)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, until: int, **how: Any) -> None:
        """Trains until a number of steps is complete; data depends on rank and step."""
        while (number := self.session.steps) < until:
            self.step(number, **how)

    def die(self) -> None:
        """Becomes unreachable once the parameters of the last step have arrived, so that the step counts."""
        self.session.wait()
        self.network.set_unreachable(self.rank, True)

    def values(self) -> list[torch.Tensor]:
        with exact(self.model):
            return values(self.model)

    def events(self) -> list[str]:
        self.session.wait()
        return [event for row in self.optimizer.ledger for event in row.events]


def with_members(
    work: Callable[[Member], T],
    *,
    world: int,
    model: nn.Module | None = None,
    make: MakeOptimizer,
    policy: Policy = EXACTLY,
    options: Options = OPTIONS,
    **network: Any,
) -> list[T]:
    """Calls `work` on every rank of a simulated network, with a copy of the model that was prepared."""
    models = [copy.deepcopy(perceptron() if model is None else model) for _ in range(world)]
    simulated = SimulatedNetwork(world, options=options, **network)

    def body(transport: SimulatedTransport) -> T:
        rank = transport.rank
        optimizer = make(models[rank])
        prepare(models[rank], optimizer, policy=policy, group=Group(transport))
        return work(Member(rank, simulated, transport, models[rank], optimizer))

    return simulated.run(body)


def survivors(
    dying: DYING, steps: int, *, world: int, make: MakeOptimizer, **how: Any
) -> dict[int, list[torch.Tensor]]:
    """Parameters of the survivors, by rank."""

    def work(member: Member) -> list[torch.Tensor] | None:
        if member.rank in dying:
            member.train(dying[member.rank])
            member.die()
            return None
        member.train(steps)
        return member.values()

    found = with_members(work, world=world, make=make, **how)
    return {rank: each for rank, each in enumerate(found) if each is not None}


def plain_without(
    dying: DYING,
    steps: int,
    *,
    world: int,
    make: MakeOptimizer,
    model: nn.Module | None = None,
    objective: Loss = regression,
    data: Callable[[int, int], torch.Tensor] = vectors,
    optimizer: Callable[[nn.Module], Optimizer] | None = None,
) -> list[torch.Tensor]:
    """What one process gets that leaves out the gradients of dead ranks from their death on."""
    model = copy.deepcopy(perceptron() if model is None else model)
    trained = make(model)
    for step in range(steps):
        parts = [data(rank, step) for rank in range(world) if step < dying.get(rank, steps)]
        plain_step(model, trained, mean_gradients(model, parts, objective))
    return values(model)


def plain_in_bfloat16(dying: DYING, steps: int, *, world: int, make: MakeOptimizer, model: nn.Module) -> Any:
    """The same for a model in bfloat16, whose owners keep float32 values."""
    model = copy.deepcopy(model)
    masters = copy.deepcopy(model).float()
    trained = make(masters)
    for step in range(steps):
        parts = [vectors(rank, step).bfloat16() for rank in range(world) if step < dying.get(rank, steps)]
        plain_step(masters, trained, mean_in_float32(model, parts, regression))
        with torch.no_grad():
            for each, master in zip(model.parameters(), masters.parameters(), strict=True):
                each.copy_(master)
    return values(model)


def all_same(found: Sequence[Sequence[torch.Tensor]]) -> bool:
    """Whether all have the same bits."""
    return all(torch.equal(one, other) for each in found[1:] for one, other in zip(found[0], each, strict=True))

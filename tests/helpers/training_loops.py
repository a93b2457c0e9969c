# mypy: disable-error-code="no-untyped-call"
# torch's own backward is untyped.
"""Programs with several sessions, or several exchanges per step, whose ranks die, return, join and leave."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from conftest import store_of_threads

import stormtorch
from stormtorch import EXACT, BoundedDrift, Options, connect, exact, prepare
from stormtorch.collectives import Group
from stormtorch.policies.policy import Policy
from training import perceptron, regression, values, vectors

OPTIONS = Options(silence_s=2.0, timeout_s=60.0, linger_s=0.2, spare_ranks=1)
EXACTLY = BoundedDrift(reliability=EXACT, bucket_mb=5e-4)


class TrainingLoop:
    """What a rank trains. `iteration` is what its loop does once."""

    def __init__(self, group: Group, policy: Policy) -> None:
        self.rank = group.transport.rank
        self.models: list[Any] = []
        self.optimizers: list[Any] = []
        self.prepare(group, policy)

    def add(self, group: Group, policy: Policy, model: Any, parameters: Any, make: Any = torch.optim.AdamW) -> None:
        optimizer = make(parameters, lr=0.003)
        prepare(model, optimizer, policy=policy, group=group)
        self.optimizers.append(optimizer)
        if model not in self.models:
            self.models.append(model)

    def prepare(self, group: Group, policy: Policy) -> None:
        raise NotImplementedError

    def iteration(self) -> None:
        raise NotImplementedError

    def wait(self) -> None:
        """Waits until the parameters of the last steps have arrived."""
        for each in self.optimizers:
            each.session.wait()

    def backward(self, place: int, *more: int) -> None:
        """Computes gradients of a model."""
        number = sum(each.session.steps for each in self.optimizers)
        for micro in (0, *more):
            regression(self.models[place], vectors(self.rank, 100 * number + micro)).backward()

    def step(self, *places: int) -> None:
        for place in places:
            self.optimizers[place].step()
        for place in places:
            self.optimizers[place].zero_grad()


class Gan(TrainingLoop):
    """Two models; the first one makes two steps, then the second one makes one, with gradients that pass the first."""

    def prepare(self, group: Group, policy: Policy) -> None:
        for seed, make in enumerate((torch.optim.AdamW, torch.optim.SGD)):
            model: Any = perceptron(seed=seed)
            self.add(group, policy, model, model.parameters(), make)

    def iteration(self) -> None:
        for _ in range(2):
            self.backward(0)
            self.step(0)
        self.backward(1)
        self.step(1)


class Halves(TrainingLoop):
    """One model with two optimizers."""

    def prepare(self, group: Group, policy: Policy) -> None:
        model: Any = perceptron()
        self.add(group, policy, model, [each for each in model.parameters() if each.dim() == 2], torch.optim.SGD)
        self.add(group, policy, model, [each for each in model.parameters() if each.dim() == 1])

    def iteration(self) -> None:
        self.backward(0)
        self.step(0, 1)


class Together(Gan):
    """Two models whose gradients are computed one after the other, before either steps."""

    def iteration(self) -> None:
        self.backward(0)
        self.backward(1)
        self.step(0, 1)


class Twice(TrainingLoop):
    """One model, of which each step adds up two backwards without `no_sync`."""

    def prepare(self, group: Group, policy: Policy) -> None:
        model: Any = perceptron()
        self.add(group, policy, model, model.parameters())

    def iteration(self) -> None:
        self.backward(0, 1)
        self.step(0)


def play(
    make: type[TrainingLoop],
    event: str,
    *,
    world: int = 3,
    within: Callable[[TrainingLoop], None] | None = None,
    policy: Policy = EXACTLY,
    within_s: float = 60.0,
) -> tuple[list[list[torch.Tensor]], dict[int, float]]:
    """Trains on ranks of which the last one dies, leaves or returns, or another one joins.

    Args:
        make: What is trained.
        event: "death", "return", "leave" or "join".
        world: Number of ranks.
        within: What the last rank does before it goes, such as half a turn; None is nothing.
        policy: Policy of all sessions.
        within_s: Seconds after which a rank is said to hang.

    Returns:
        The parameters on every rank that is left, and the longest turn of each in seconds, by rank.
    """
    store = store_of_threads()
    found: dict[int, list[torch.Tensor]] = {}
    longest: dict[int, float] = {}
    errors: list[BaseException] = []
    address: list[str] = []
    steps: list[int] = []

    def body(rank: int) -> None:
        try:
            live(rank)
        except SystemExit:
            pass
        except BaseException as error:
            errors.append(error)

    def iteration(program: TrainingLoop) -> None:
        began = time.monotonic()
        program.iteration()
        longest[program.rank] = max(longest.get(program.rank, 0.0), time.monotonic() - began)
        time.sleep(0.01)

    def live(rank: int) -> None:
        if rank == world:
            while not address:
                time.sleep(0.01)
            program = make(stormtorch.join(address[0], OPTIONS), policy)
        else:
            transport: Any = connect(store, rank, world, OPTIONS)
            program = make(Group(transport), policy)
            for _ in range(3):
                iteration(program)
        if rank == 0:
            address.append(f"127.0.0.1:{transport.cards[0].reception}")
        if rank == world - 1 and event != "join":
            program.wait()
            if within is not None:
                within(program)
            if event == "leave":
                transport.leaving = True
                transport.endpoint.request_leave()
                for hand_over in list(transport.on_leave):
                    hand_over()
                transport.close()
                return
            transport.close(0.0)
            if event == "death":
                return
            transport = connect(store, rank, world, replace(OPTIONS, rejoin=True))
            program = make(Group(transport), policy)
        size = world + (event == "join") - (event in ("leave", "death"))
        session = program.optimizers[-1].session
        while session.view.number == 1 or len(session.view.members) != size:
            iteration(program)
        if rank == 0:
            steps.append(session.steps + 8)
        while not steps:
            iteration(program)
        while session.steps < steps[0]:
            iteration(program)
        transport = program.optimizers[0].session.group.transport
        seen = []
        for model in program.models:
            with exact(model):
                seen += values(model)
        found[program.rank] = seen
        transport.drain()
        transport.close()

    ranks = range(world + (event == "join"))
    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in ranks]
    for each in threads:
        each.start()
    end = time.monotonic() + within_s
    for each in threads:
        each.join(max(end - time.monotonic(), 0.0))
    if errors:
        raise errors[0]
    left = len(ranks) - (event in ("leave", "death"))
    assert len(found) == left, f"of {left} ranks only {sorted(found)} have ended"
    return [found[rank] for rank in sorted(found)], longest

"""Simulated trainings of the models that ranks train in other tests, and what is left of them."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from stormtorch_lab.simulation import Simulated, run, simulate
from stormtorch_lab.simulation.replicated import Replicated
from training import Loss, MakeOptimizer, regression, values, vectors

Data = Callable[[int, int], torch.Tensor]
"""Of a rank and a step."""


class Given(nn.Module):
    """Parameters for a `MakeOptimizer`, which asks a model for them."""

    def __init__(self, parameters: Any) -> None:
        super().__init__()
        self.each = nn.ParameterList(parameters)


def stacked(data: Data) -> Callable[[int, int, int], torch.Tensor]:
    """The batches of some workers, as the simulator asks for them."""
    return lambda step, first, last: torch.stack([data(worker, step) for worker in range(first, last)])


def outcome(
    model: nn.Module,
    make: MakeOptimizer,
    steps: int,
    *,
    objective: Loss = regression,
    data: Data = vectors,
    workers: int = 4,
    **settings: Any,
) -> tuple[Simulated, nn.Module]:
    """A simulation, and a model with the parameters that count after it."""
    judged: list[nn.Module] = []

    def keep(found: nn.Module) -> tuple[float, float]:
        judged.append(found)
        return 0.0, 0.0

    done = simulate(
        model,
        objective,
        stacked(data),
        lambda parameters: make(Given(parameters)),
        workers=workers,
        steps=steps,
        evaluate=keep,
        evaluate_every=steps,
        **settings,
    )
    return done, judged[-1]


def keep_trainings(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Where the inner state of all simulations to come is found: a `Sharded` or a `Replicated` each."""
    made: list[Any] = []

    def keep(kind: type, *arguments: Any) -> Any:
        made.append(kind(*arguments))
        return made[-1]

    for name in ("Sharded", "Replicated"):
        monkeypatch.setattr(run, name, functools.partial(keep, getattr(run, name)))
    return made


def replicas_of(training: Any) -> torch.Tensor:
    """(W, C, E): what each worker of such a simulation has."""
    if isinstance(training, Replicated):
        return training._models
    replicas: torch.Tensor = training.setting.chunks.empty(training.setting.workers, device=torch.device("cpu"))
    training._replicas.put(0, training.setting.workers, replicas)
    return replicas


def simulated(model: nn.Module, make: MakeOptimizer, steps: int, **settings: Any) -> list[torch.Tensor]:
    """The parameters that count after some steps."""
    return values(outcome(model, make, steps, **settings)[1])

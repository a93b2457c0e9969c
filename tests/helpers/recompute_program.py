# mypy: disable-error-code="no-untyped-call"
# torch's own backward is untyped.
"""What a random job trains, and what befalls it: deaths, returns, joins, leaves and pauses."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stormtorch import EXACT, BoundedDrift, DiLoCo
from stormtorch.policies.policy import Policy
from training import perceptron, regression, vectors

POINTS = ("rest", "bucket", "reduced", "taking", "stepping", "sending", "arrived", "any")
"""Moments of a step at which a rank may die: between two steps; with some buckets of gradients on their way; when they
are averaged; before and after its standby is sent them; with some buckets of parameters on their way; when all have
arrived; and some milliseconds after the step has begun, wherever that is. Under DiLoCo also "followed": when its
standby has what it needs to follow, and nobody the answer."""
SILENCE_S = 2.0
LARGEST_SCALE = 4096.0
"""Scale of gradients above which this program's overflow."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A training loop. The same functions run on a rank and in the process that recomputes."""

    sessions: str = "one"
    """"one", "halves" (a model with two optimizers), or "models" (two models)."""
    optimizer: str = "adamw"
    micro: int = 1
    clip: float | None = None
    scaler: bool = False
    closure: bool = False
    clamp: bool = False
    """Whether weights are clamped through `.data` after each step."""
    diloco: bool = False
    loss: float = 0.0
    """Fraction of datagrams that is lost; then nothing is sent twice."""

    def model(self) -> nn.Module:
        """The model of all sessions."""
        if self.sessions == "models":
            return nn.ModuleList([perceptron(), perceptron(inside=16, seed=1)])
        return perceptron(inside=160 if self.loss else 24)

    def parts(self, model: nn.Module) -> list[nn.Module]:
        """The modules that are trained one after the other in each step."""
        return list(model) if isinstance(model, nn.ModuleList) else [model]

    def trained(self, model: nn.Module) -> list[tuple[nn.Module, list[nn.Parameter]]]:
        """Module and parameters of each session."""
        if self.sessions == "halves":
            everything = list(model.parameters())
            return [(model, [each for each in everything if (each.dim() == 2) is matrix]) for matrix in (True, False)]
        return [(part, list(part.parameters())) for part in self.parts(model)]

    def make(self, parameters: Any, session: int = 0) -> torch.optim.Optimizer:
        """The optimizer of a session."""
        kind = self.optimizer if session == 0 else {"adamw": "sgd"}.get(self.optimizer, "adamw")
        match kind:
            case "sgd":
                return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
            case "adam":
                return torch.optim.Adam(parameters, lr=0.003)
            case "rmsprop":
                return torch.optim.RMSprop(parameters, lr=0.003, momentum=0.5)
            case _:
                return torch.optim.AdamW(parameters, lr=0.003)

    def policy(self) -> Policy:
        """The policy of all sessions."""
        if self.diloco:
            return DiLoCo(every=3, outer_lr=0.7, reliability=EXACT, bucket_mb=5e-4)
        if self.loss:
            return BoundedDrift(bucket_mb=2e-3, guard=None)
        return BoundedDrift(reliability=EXACT, bucket_mb=5e-4)

    def losses(
        self,
        part: nn.Module,
        rank: int,
        number: int,
        scale: float,
        scaled: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> list[Callable[[], torch.Tensor]]:
        """The objective of each micro-batch of a rank's step, as functions that give what `backward` is called on.

        Args:
            part: What is trained.
            rank: The rank.
            number: Number of the step.
            scale: Scale of gradients.
            scaled: Scales a loss by it, as a GradScaler does.
        """

        def objective(micro: int) -> torch.Tensor:
            found = regression(part, vectors(rank, 100 * number + micro))
            found = found * scale if scaled is None else scaled(found)
            return found * torch.inf if scale > LARGEST_SCALE and rank % 2 == 0 else found

        return [lambda micro=micro: objective(micro) for micro in range(self.micro)]  # type: ignore[misc]

    @torch.no_grad()
    def after(self, parameters: Sequence[torch.Tensor]) -> None:
        """What the program does with a session's parameters after a step."""
        if self.clamp:
            for each in parameters:
                each.data.clamp_(-0.3, 0.3)


@dataclass(frozen=True)
class Event:
    """What befalls a rank at the first step from `step` on at which the view has `members` members."""

    kind: str
    """"die", "pause", "leave", or "join" (a further process comes; `rank` says nothing)."""
    rank: int
    step: int
    point: str = "rest"
    place: int = 0
    """Number of buckets that are on their way, at a point within a step."""
    seconds: float = 0.0
    """How long a rank is paused, hesitates to leave, or is dead until it returns; 0: it does not return."""
    members: int = 0


@dataclass(frozen=True)
class Schedule:
    """A job: what it trains, and what befalls it."""

    seed: int
    ranks: int
    program: Program
    events: tuple[Event, ...]

    def words(self) -> str:
        """Says it in a line."""
        program = ", ".join(
            f"{name}={value}"
            for name, value in vars(self.program).items()
            if value not in (False, None, 0.0) and not (name == "micro" and value == 1)
        )
        events = "; ".join(
            f"{each.kind} {each.rank} at {each.step} {each.point}{f' {each.seconds:.1f} s' if each.seconds else ''}"
            for each in self.events
        )
        return f"{self.ranks} ranks, {program}: {events}"


def draw(seed: int, kinds: Sequence[str] = ()) -> Schedule:
    """Draws a job.

    Args:
        seed: Seed of it.
        kinds: Kinds of program from which to draw; empty is all of them.
    """
    drawn = random.Random(seed)
    kind = drawn.choice(tuple(kinds) or ("one", "one", "one", "halves", "models", "scaler", "diloco", "lossy"))
    ranks = drawn.randint(3, 5)
    sessions = kind if kind in ("halves", "models") else "one"
    diloco = kind == "diloco"
    closure = kind == "one" and drawn.random() < 0.25
    program = Program(
        sessions=sessions,
        optimizer=drawn.choice(("adamw", "sgd", "adam", "rmsprop")),
        micro=drawn.choice((1, 1, 2)),
        clip=None if diloco or closure else drawn.choice((None, None, 0.05)),
        scaler=kind == "scaler",
        closure=closure,
        clamp=not diloco and drawn.random() < 0.3,
        diloco=diloco,
        loss=0.1 if kind == "lossy" else 0.0,
    )
    return Schedule(seed, ranks, program, tuple(_possible(_events(drawn, ranks, program))))


def _possible(events: Sequence[Event]) -> list[Event]:
    """Leaves out what would befall a process that is dead already: its successor has the rank, but not the events."""
    dead: set[int] = set()
    found = []
    for each in events:
        if each.kind == "join" or each.rank not in dead:
            found.append(each)
        if each.kind == "die":
            dead.add(each.rank)
    return found


def _events(drawn: random.Random, ranks: int, program: Program) -> list[Event]:
    """Draws what befalls a job so that a majority of every view is left to agree on the next one."""
    events: list[Event] = []
    alive, step = set(range(ranks)), 3
    members = ranks  # as many as there are when nobody is late
    for _ in range(drawn.randint(2, 5)):
        step += drawn.randint(2, 8)
        kind = drawn.choice(("die", "die", "die", "die", "pause", "leave", "join"))
        if kind == "join":
            events.append(Event("join", ranks, step))
            members += 1
            continue
        rank = drawn.choice(sorted(alive))
        if kind == "pause":
            seconds = drawn.choice((0.3, SILENCE_S + 1.5))
            events.append(Event("pause", rank, step, seconds=seconds, members=members))
            continue
        returns = drawn.choice((0.0, 0.2, 1.0)) if kind == "die" else 0.0
        if not returns and len(alive) <= 2:
            continue
        point = (
            drawn.choice(("rest", "bucket", "arrived", "any") if program.diloco else POINTS)
            if kind == "die"
            else "rest"
        )
        events.append(Event(kind, rank, step, point, drawn.randint(0, 2), returns, members))
        if not returns:
            alive.discard(rank)
            members -= 1
    return events

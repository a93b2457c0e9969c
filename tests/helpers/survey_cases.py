# mypy: disable-error-code="no-untyped-call"
# torch's own backward is untyped.
"""One program on ranks, undisturbed or during a join or leave, compared with a single process."""

from __future__ import annotations

import copy
import logging
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import HashStore  # torch.distributed has it, but its types do not

import stormtorch
from stormtorch import Options, Policy, connect, exact, prepare
from stormtorch.collectives import Group
from stormtorch.errors import ExchangeTimeout
from stormtorch.exchange.simulated import SimulatedNetwork, SimulatedTransport
from training import Optimizer, perceptron, regression, values, vectors
from views import EXACTLY
from views import OPTIONS as IN_SIMULATOR

CASES = ("2 ranks", "3 ranks", "one killed", "one joins", "one returns")
AT, STEPS = 4, 8
_OPTIONS = Options(silence_s=3.0, timeout_s=30.0, linger_s=0.2)
_WITHIN_S = 40.0
# Norms and means are added up in another order on ranks than in one process, and a few steps make that larger.
ROUNDING = 2e-5
# Said to every newcomer: it explains a difference only where the program has something of its own.
_OF_PROGRAMS = "comes along only by session.carry()"


@dataclass
class Loop:
    """What a program has in its loop: the same calls work on a rank and in the process beside."""

    model: Any
    optimizers: list[Any]
    rank: int
    members: Callable[[int], Sequence[int]] | None = None
    """Ranks whose gradients are averaged at a step; None on a rank."""
    objective: Callable[[nn.Module, torch.Tensor], torch.Tensor] = regression
    memo: dict[str, Any] = field(default_factory=dict)

    @property
    def optimizer(self) -> Any:
        return self.optimizers[0]

    def loss(self, rank: int, step: int, micro: int) -> torch.Tensor:
        return self.objective(self.model, vectors(rank, 10 * step + micro))

    def backward(self, step: int, micro: int = 0, scale: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        """Computes this rank's gradient; in one process, the mean of those of all ranks."""
        scale = scale or (lambda loss: loss)
        if self.members is None:
            scale(self.loss(self.rank, step, micro)).backward()
            return
        parameters = list(self.model.parameters())
        before = [each.grad for each in parameters]
        sums: list[torch.Tensor | None] = [None] * len(parameters)
        members = self.members(step)
        for rank in members:
            for each in parameters:
                each.grad = None
            scale(self.loss(rank, step, micro)).backward()
            for place, each in enumerate(parameters):
                if each.grad is not None:
                    found = each.grad.detach().clone()
                    known = sums[place]
                    sums[place] = found if known is None else known + found
        for each, earlier, total in zip(parameters, before, sums, strict=True):
            if total is None:
                each.grad = earlier
            else:
                mean = total / len(members)
                each.grad = mean if earlier is None else earlier + mean


@dataclass(frozen=True)
class Subject:
    """A program to survey."""

    name: str
    make: Callable[[nn.Module], Sequence[Optimizer]]
    """Makes its optimizers."""
    step: Callable[[Loop, int], None]
    model: Callable[[], nn.Module] = perceptron
    objective: Callable[[nn.Module, torch.Tensor], torch.Tensor] = regression
    ready: Callable[[Loop], None] = lambda _loop: None
    """Called after `prepare`."""
    keeps: bool = False
    """Whether the program itself keeps what its next steps depend on, as is said to every newcomer."""
    policy: Policy = EXACTLY


@dataclass
class Found:
    """What ranks have got: parameters by rank, what was said, and who gave gradients at each step."""

    values: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    members: dict[int, Sequence[int]] = field(default_factory=dict)
    steps: int = STEPS


class _Words(logging.Handler):
    def __init__(self, found: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.found = found

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


def _begin(subject: Subject, model: nn.Module, rank: int, group: Group) -> Loop:
    optimizers = list(subject.make(model))
    for each in optimizers:
        prepare(model, each, policy=subject.policy, group=group)
    loop = Loop(model, optimizers, rank, objective=subject.objective)
    subject.ready(loop)
    return loop


def _values(loop: Loop) -> list[torch.Tensor]:
    with exact(loop.model):
        return values(loop.model)


# --- on a simulated network -------------------------------------------------------------------------------------------


def _simulated(subject: Subject, world: int, victim: int | None) -> Found:
    model = subject.model()
    models = [copy.deepcopy(model) for _ in range(world)]
    network = SimulatedNetwork(world, options=IN_SIMULATOR)
    found = Found()
    for step in range(STEPS):
        found.members[step] = [each for each in range(world) if each != victim or step < AT]

    def body(transport: SimulatedTransport) -> None:
        rank = transport.rank
        loop = _begin(subject, models[rank], rank, Group(transport))
        session = loop.optimizer.session
        while (number := session.steps) < (AT if rank == victim else STEPS):
            subject.step(loop, number)
            if session.steps == number:
                raise AssertionError("no step was made")
        for each in loop.optimizers:
            each.session.wait()
        if rank == victim:
            network.set_unreachable(rank, True)
            return
        found.values[rank] = _values(loop)

    network.run(body)
    return found


# --- over loopback ----------------------------------------------------------------------------------------------------


def _over_loopback(subject: Subject, case: str) -> Found:
    """Ranks are threads: the last one joins two others, or goes and returns as a new process would."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=20))
    joins = case == "one joins"
    world = 2 if joins else 3
    model = subject.model()
    found, errors, stage = Found(), [], {"steps": 0, "address": ""}
    joined = threading.Event()

    def body(place: int) -> None:
        try:
            live(place)
        except BaseException as error:
            errors.append(error)
            joined.set()

    def live(place: int) -> None:
        new = copy.deepcopy(model)
        if place == world:
            while not stage["steps"] and not errors:
                time.sleep(0.01)
            group = stormtorch.join(str(stage["address"]), _OPTIONS)
            transport: Any = group.transport
            loop = _begin(subject, new, transport.rank, group)
            joined.set()
        else:
            transport = connect(store, place, world, _OPTIONS)
            if place == 0:
                stage["address"] = f"127.0.0.1:{transport.cards[0].reception}"
            loop = _begin(subject, new, place, Group(transport))
            for step in range(2):
                train(loop, step)
            if case == "one returns" and place == world - 1:
                transport.close(0.2)
                transport = connect(store, place, world, replace(_OPTIONS, rejoin=True))
                loop = _begin(subject, copy.deepcopy(model), place, Group(transport))
                joined.set()
        session = loop.optimizer.session
        end = time.monotonic() + _WITHIN_S
        while session.view.number == 1 or len(session.view.members) < 3:
            train(loop, session.steps)
            time.sleep(0.01)
            if errors or time.monotonic() > end:
                raise TimeoutError("the third rank does not come")
        until = session.view.step + 4
        while session.steps < until:
            train(loop, session.steps)
        found.values[transport.rank] = _values(loop)
        if transport.rank == 0:
            found.steps = until
        transport.drain()
        transport.close()

    def train(loop: Loop, step: int) -> None:
        subject.step(loop, step)
        if loop.rank == 0:
            found.members[step] = loop.optimizer.session.view.members
            stage["steps"] = step + 1

    threads = [threading.Thread(target=body, args=(place,), daemon=True) for place in range(world + joins)]
    for each in threads:
        each.start()
    end = time.monotonic() + _WITHIN_S
    for each in threads:
        each.join(max(end - time.monotonic(), 0.0))
    if errors:
        raise errors[0]
    if len(found.values) < 3:
        raise TimeoutError(f"only ranks {sorted(found.values)} have ended")
    return found


# --- one process ------------------------------------------------------------------------------------------------------


def plain(
    subject: Subject, members: Mapping[int, Sequence[int]], steps: int, *, seed: int = 1
) -> tuple[Loop, list[torch.Tensor]]:
    """What one process gets that averages the same gradients, and the parameters with which it began."""
    model = subject.model()
    torch.manual_seed(seed)
    begun = values(model)
    loop = Loop(model, list(subject.make(model)), 0, lambda step: members[step], subject.objective)
    subject.ready(loop)
    for step in range(steps):
        subject.step(loop, step)
    return loop, begun


def judge(subject: Subject, case: str) -> tuple[str, str]:
    """Runs a case. Returns a verdict, and what it is about.

    Verdicts: "same bits", "rounding", "refused" and "documented", with the sentence that was said, "WRONG", with the
    distance in parts of what training has moved, and "fails", with an error that does not say what to do instead.
    """
    said: list[str] = []
    listener, log = _Words(said), logging.getLogger("stormtorch")
    log.addHandler(listener)
    try:
        match case:
            case "2 ranks" | "3 ranks":
                found = _simulated(subject, int(case[0]), None)
            case "one killed":
                found = _simulated(subject, 3, 0)
            case _:
                found = _over_loopback(subject, case)
    except Exception as error:
        words = f"{type(error).__name__}: {error}".split("\n")[0][:300]
        if isinstance(error, ExchangeTimeout):
            return "hangs", words
        return ("refused" if _is_ours(error) else "fails"), words
    finally:
        log.removeHandler(listener)
    loop, begun = plain(subject, found.members, found.steps)
    expected = values(loop.model)
    moved = max(float((one - other).abs().max()) for one, other in zip(expected, begun, strict=True)) or 1.0
    apart = max(
        float((one - other).abs().nan_to_num(torch.inf).max())
        for got in found.values.values()
        for one, other in zip(got, expected, strict=True)
    )
    if apart == 0.0:
        return "same bits", ""
    if apart <= ROUNDING * moved:
        return "rounding", f"{apart / moved:.0e}"
    words = next((each for each in said if not _of_members(each)), "")
    if subject.keeps:
        words = words or next((each for each in said if _OF_PROGRAMS in each), "")
    return ("documented" if words else "WRONG"), words[:300] or f"{apart / moved:.2g}"


def _is_ours(error: BaseException) -> bool:
    """Whether the package itself raised an error, on purpose."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return "/stormtorch/" in last.filename and (last.line or "").startswith("raise")


def alone(subject: Subject) -> str:
    """Returns why a subject cannot be surveyed; nothing if it runs in one process, twice with the same result."""
    found = []
    for seed in (1, 2):
        try:
            loop, begun = plain(subject, {step: [0, 1] for step in range(STEPS)}, STEPS, seed=seed)
        except Exception as error:
            return f"does not run by itself: {type(error).__name__}: {error}".split("\n")[0][:160]
        found.append(values(loop.model))
    if all(torch.equal(one, other) for one, other in zip(begun, found[0], strict=True)):
        return "moves nothing"
    if not all(torch.equal(one, other) for one, other in zip(*found, strict=True)):
        return "draws random numbers: no two runs are alike"
    return ""


def _of_members(words: str) -> bool:
    """Whether a warning only reports joins and leaves."""
    usual = (" begins at step ", "without a key", "leaves at step", _OF_PROGRAMS, "requires_grad of")
    return any(each in words for each in usual)

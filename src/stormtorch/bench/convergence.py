"""Speed at which a language model learns, in seconds and not in steps: validation loss against the clock.

report = ConvergenceReport.begin(settings)
for curve in run_convergence(settings):
    report.curves.append(curve)
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stormtorch.bench.backends import check_backends, congestion_controls
from stormtorch.bench.replicas import (
    BACKENDS,
    GlooReplica,
    Replica,
    Task,
    close_groups,
    contenders,
    next_token_loss,
    open_groups,
    open_replica,
)
from stormtorch.checks import check_between, check_subset
from stormtorch.jobs.control import Cue, Stage
from stormtorch.jobs.counters import Delivery
from stormtorch.jobs.places import open_lab, run_here, run_in_lab
from stormtorch.jobs.ranks import Member
from stormtorch.lab.conditions import Conditions
from stormtorch.policies.presets import WIRES
from stormtorch.results.progress import Advance, ignore_progress
from stormtorch.results.report import write_json
from stormtorch.results.surroundings import surroundings
from stormtorch.tasks.data.corpus import open_corpus
from stormtorch.tasks.models.llama import Llama, LlamaSize

CLOCK = (
    "seconds of training by the slowest rank: steps, the arrival of the last parameters before an evaluation, and, "
    "where replicas may differ, owners sending theirs to all for it; evaluations themselves are not on the clock"
)
STEP = "zero_grad, forward, backward and AdamW at a constant rate, betas 0.9 and 0.95; one torch thread per rank"
# Sequences held out, over all ranks.
_VALIDATION_SEQUENCES = 64


@dataclass(frozen=True, kw_only=True)
class ConvergenceSettings:
    """Settings of the benchmark."""

    ranks: int = 4
    """Processes of this machine, or hosts of a lab with one each."""
    seconds: float = 60.0
    """Seconds of training for each backend."""
    every_s: float = 3.0
    """Seconds of training between two evaluations, about."""
    layers: int = 4
    width: int = 256
    """Width of the model, a multiple of 64: 4 layers of 256 have 3.2 million parameters."""
    batch: int = 4
    """Sequences that each rank learns from in a step."""
    context: int = 64
    """Bytes of a sequence."""
    lr: float = 1e-3
    seed: int = 0
    """Seed of weights and batches, the same for all backends."""
    backends: tuple[str, ...] = ("gloo", "storm-drift")
    wires: tuple[str, ...] = ("float32", "bfloat16")
    """Wires of storm-lossy and storm-drift: each of them is a backend of its own."""
    network: Conditions | None = None
    """Conditions of a lab, where loss is real and meets all backends; None is loopback."""
    patience_s: float = 60.0
    """Seconds without an evaluation after which a backend over TCP is given up, in a lab."""
    timeout_s: float = 600.0
    """Seconds after which a backend must have ended."""

    def __post_init__(self) -> None:
        check_between("ranks", self.ranks, 2, 64)
        check_between("seconds", self.seconds, 0.1, 1e5)
        check_between("every_s", self.every_s, 0.01, 1e5)
        check_between("batch", self.batch, 1, 10_000)
        check_between("context", self.context, 1, 10_000)
        check_between("lr", self.lr, 1e-9, 10)
        check_backends(self.backends, self.network, BACKENDS)
        check_subset("wire", self.wires, tuple(WIRES))
        check_between("patience_s", self.patience_s, 0.1, 1e5)
        check_between("timeout_s", self.timeout_s, 1, 1e6)
        _ = self.size

    @property
    def contenders(self) -> tuple[str, ...]:
        """Backends, with one for each of the wires in place of storm-lossy and of storm-drift."""
        return contenders(self.backends, self.wires)

    @property
    def size(self) -> LlamaSize:
        """Size of the model."""
        return LlamaSize(layers=self.layers, width=self.width, heads=max(self.width // 64, 1))


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One backend's training; its lists have one entry per evaluation, the first before any step."""

    backend: str
    clock_s: list[float]
    """Seconds of training until then."""
    steps: list[int]
    """Steps until then."""
    losses: list[float]
    """Mean cross-entropy of the next byte over what is held out, in nats."""
    params: int
    arrived: float
    """Fraction of the chunks that arrived, mean over ranks and steps."""
    gave_up: bool
    """Whether the curve ends too early: no further evaluation came within the patience."""
    tcp: str | None
    """Congestion control of its connections, as the kernel reports it; None without TCP."""
    measured: dict[str, Any] | None = None
    """Counts of the network itself during this training, in a lab."""

    @property
    def best(self) -> float:
        """Least loss that it came to."""
        return min(self.losses)

    @property
    def step_s(self) -> float | None:
        """Mean seconds on the clock for a step; None if none was made."""
        return self.clock_s[-1] / self.steps[-1] if self.steps[-1] else None

    def reached_s(self, loss: float) -> float | None:
        """Seconds until it first came to that loss, on a straight line between evaluations; None if it did not."""
        for index, value in enumerate(self.losses):
            if value <= loss:
                if index == 0:
                    return self.clock_s[0]
                before, since = self.losses[index - 1], self.clock_s[index - 1]
                share = (before - loss) / (before - value)
                return since + share * (self.clock_s[index] - since)
        return None


@dataclass(frozen=True)
class ConvergenceReport:
    """Results, and the conditions under which they came out; curves are added one by one."""

    conditions: dict[str, Any]
    curves: list[Curve] = field(default_factory=list)

    @classmethod
    def begin(cls, settings: ConvergenceSettings) -> "ConvergenceReport":
        """Makes a report without any curve.

        Raises:
            stormtorch.checks.BadSetting: There is nothing to learn from.
        """
        asked = asdict(settings)
        asked["network"] = "loopback" if settings.network is None else "lab"
        if settings.network is not None:
            asked["requested"] = settings.network.to_json()
        asked["backends"] = list(settings.contenders)
        return cls(asked | {"clock": CLOCK, "step": STEP, "corpus": open_corpus().to_json()} | surroundings())

    @property
    def target(self) -> float | None:
        """The least loss that all who were not given up have come to; None before there are any."""
        ended = [curve.best for curve in self.curves if not curve.gave_up]
        return max(ended) if ended else None

    @property
    def peer(self) -> Curve | None:
        """The first gloo: what the others are compared with."""
        return next((curve for curve in self.curves if curve.backend.startswith("gloo")), None)

    def reached_s(self, curve: Curve) -> float | None:
        """Seconds until a curve came to the target."""
        return None if self.target is None else curve.reached_s(self.target)

    def speedup(self, curve: Curve) -> float | None:
        """Factor by which it came there sooner than the first gloo."""
        reached_s = self.reached_s(curve)
        peer_s = None if self.peer is None else self.reached_s(self.peer)
        return peer_s / reached_s if reached_s and peer_s else None

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        results = [
            asdict(curve) | {"step_s": curve.step_s, "reached_s": self.reached_s(curve), "speedup": self.speedup(curve)}
            for curve in self.curves
        ]
        return {"conditions": self.conditions | {"target_loss": self.target}, "results": results}

    def write(self, path: Path) -> None:
        """Writes JSON; makes missing folders."""
        write_json(path, self.to_json())


def run_convergence(settings: ConvergenceSettings, advance: Advance = ignore_progress) -> Iterator[Curve]:
    """Trains with one backend after the other, each in processes of its own; the same lab serves all.

    Raises:
        stormtorch.jobs.failed.RankFailed: A rank failed or did not end in time.
        stormtorch.lab.LabError: The lab failed, or none can be made here.
    """
    with contextlib.ExitStack() as places:
        network, lab = settings.network, None
        if network is not None:
            lab = places.enter_context(open_lab(settings.ranks, network, congestion_controls(settings.backends)))
        for index, name in enumerate(settings.contenders):
            told = partial(_progress, advance, round(index * settings.seconds))
            advance(name, round(index * settings.seconds))
            args, limit_s = (settings, name), settings.timeout_s
            if lab is None or network is None:
                curves, where = run_here(_rank_learns, settings.ranks, args, timeout_s=limit_s, advance=told)
            else:
                curves, where = run_in_lab(
                    _rank_learns, lab, network, settings.ranks, args, timeout_s=limit_s, advance=told
                )
            arrived = sum(curve.arrived for curve in curves) / len(curves)
            yield Curve(**asdict(curves[0]) | {"arrived": arrived, "measured": where.get("measured")})


def _progress(advance: Advance, before: int, what: str, _evaluations: int) -> None:
    """Shows progress: messages of ranks end with the seconds on their clock."""
    text, _, seconds = what.partition(" after ")
    advance(text, before + round(float(seconds.split()[0])))


# --- on every rank -------------------------------------------------------------------------------------------------


def _rank_learns(member: Member, settings: ConvergenceSettings, name: str) -> Curve:
    open_groups(member)
    task, held_out = _task(settings, member.rank, member.world)
    replica = open_replica(name, task, member)
    lab = settings.network is not None
    patience_s = settings.patience_s if lab else None
    clock_s, steps, losses, arrived = [0.0], [0], list[float](), list[float]()
    gave_up = False
    with Stage(member, [replica], patience_s=patience_s, lab=lab) as stage:
        stage.cue(Cue.LOSE)
        stage.cue(Cue.COUNT)
        losses.append(_evaluate(stage, replica, held_out))
        count = 1
        while clock_s[-1] < settings.seconds:
            sample = stage.timed(replica, partial(_learn, replica, count), 0, len(losses))
            if sample.gave_up:
                gave_up = True
                break
            seconds = _slowest(stage, sample.seconds)
            clock_s.append(clock_s[-1] + seconds)
            steps.append(steps[-1] + count)
            arrived.append(sample.arrived)
            losses.append(_evaluate(stage, replica, held_out))
            # The first steps have to make memory and connections: they say little about those to come.
            ahead_s = min(settings.every_s, max(settings.seconds - clock_s[-1], 0.0))
            count = min(max(math.ceil(ahead_s * count / seconds), 1), 8 * count)
            if member.rank == 0:
                member.tell(f"{name}, loss {losses[-1]:.2f} after {clock_s[-1]:.1f} s")
        stage.cue(Cue.READ)
    close_groups()
    return Curve(
        backend=name,
        clock_s=clock_s,
        steps=steps,
        losses=losses,
        params=sum(parameter.numel() for parameter in task.model.parameters()),
        arrived=sum(arrived) / len(arrived) if arrived else 1.0,
        gave_up=gave_up,
        tcp=replica.connections.congestion_control if isinstance(replica, GlooReplica) else None,
    )


def _learn(replica: Replica, steps: int) -> Delivery:
    delivery = replica.turn(steps)
    replica.synchronise()
    return delivery


def _slowest(stage: Stage[Replica], seconds: float) -> float:
    """Largest time of all ranks, the same number on each."""
    times_R = torch.zeros(stage.member.world, dtype=torch.float64)
    times_R[stage.member.rank] = seconds
    stage.control.allreduce([times_R]).wait()
    return float(times_R.max())


@torch.no_grad()
def _evaluate(stage: Stage[Replica], replica: Replica, held_out: torch.Tensor) -> float:
    """The mean over all ranks' parts of what is held out, the same number on each."""
    # Of DistributedDataParallel, the module itself: a forward under it may look at its group.
    model = getattr(replica.model, "module", replica.model)
    loss = next_token_loss(model(held_out[:, :-1]), held_out) if len(held_out) else torch.zeros(())
    sums = torch.tensor([float(loss) * len(held_out), len(held_out)], dtype=torch.float64)
    stage.control.allreduce([sums]).wait()
    return float(sums[0] / sums[1])


def _task(settings: ConvergenceSettings, rank: int, world: int) -> tuple[Task, torch.Tensor]:
    corpus = open_corpus()
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(settings.seed)
        model = Llama(settings.size)

    def batch(step: int) -> torch.Tensor:
        # A step's sequences are drawn together and dealt out, so that ranks never draw the same numbers.
        generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + step)
        return _windows(corpus.training, settings.batch * world, settings.context, generator)[rank::world]

    held_out = _windows(corpus.validation, _VALIDATION_SEQUENCES, settings.context, torch.Generator().manual_seed(0))
    task = Task(model, lambda each: torch.optim.AdamW(each.parameters(), lr=settings.lr, betas=(0.9, 0.95)), batch)
    return task, held_out[rank::world]


def _windows(text: torch.Tensor, count: int, context: int, generator: torch.Generator) -> torch.Tensor:
    """Sequences of `context` bytes and the one behind them, from anywhere in the text."""
    first = torch.randint(len(text) - context, (count, 1), generator=generator)
    return text[first + torch.arange(context + 1)].long()

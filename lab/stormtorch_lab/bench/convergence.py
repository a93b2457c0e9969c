"""Convergence benchmark: settings and results of a language model's training, over seconds instead of steps.

report = ConvergenceReport.begin(settings)
for curve in run_convergence(settings):         # of bench/learning.py
    report.curves.append(curve)
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stormtorch.checks import BadSetting, check_between, check_subset
from stormtorch.policies.policy import Policy
from stormtorch.telemetry.json_files import write_json
from stormtorch_lab.bench.backends import check_backends
from stormtorch_lab.bench.replicas import BACKENDS, contenders
from stormtorch_lab.jobs.surroundings import surroundings
from stormtorch_lab.netns.conditions import Conditions
from stormtorch_lab.policies.presets import WIRES, PolicySettings, make_policy
from stormtorch_lab.policies.presets import named as policies
from stormtorch_lab.tasks.data.corpus import open_corpus
from stormtorch_lab.tasks.models.llama import LlamaSize

CLOCK = (
    "seconds of training by the slowest rank: steps, the arrival of the last parameters before an evaluation, and, "
    "if replicas may differ, the owners' broadcast of their parameters for it; the clock stops for evaluations, and "
    "for averaging the models before one if each rank trains its own"
)
STEP = (
    "zero_grad, forward, backward and AdamW at a constant learning rate, betas 0.9 and 0.95; one torch thread per rank"
)
TURNS = "after each evaluation, the backend with the least training time goes next; all share the same processes"
ONE_BY_ONE = "one after the other, each in its own processes"


@dataclass(frozen=True, kw_only=True)
class ConvergenceSettings:
    """Settings of the benchmark."""

    ranks: int = 4
    """Processes of this machine, or hosts of a lab with one process each."""
    seconds: float = 60.0
    """Seconds of training for each backend."""
    every_s: float = 3.0
    """Seconds of training between two evaluations, about."""
    layers: int = 4
    width: int = 256
    """Width of the model, a multiple of 64: 4 layers of 256 have 3.2 million parameters."""
    batch: int = 4
    """Sequences of each rank per step."""
    context: int = 64
    """Bytes of a sequence."""
    lr: float = 1e-3
    seed: int = 0
    """Seed of weights and batches, the same for all backends."""
    backends: tuple[str, ...] = ("gloo", "storm-drift")
    wires: tuple[str, ...] = ("float32", "bfloat16")
    """Wires of storm-lossy and storm-drift: each wire is a separate backend."""
    policy: PolicySettings = field(default_factory=lambda: PolicySettings(every=30))
    """Settings of backends that are policies."""
    target: float | None = None
    """Target loss whose times are compared; None is the lowest that all backends reached."""
    network: Conditions | None = None
    """Conditions of a lab, whose loss affects all backends; None is loopback."""
    faults: float = 0.0
    """Fraction of storm's datagrams dropped by fault injection, on loopback; TCP loses none."""
    turns: bool = False
    """Whether backends alternate, so that other load on the machine affects all alike; or train one by one."""
    patience_s: float = 60.0
    """Seconds without an evaluation after which a backend over TCP is aborted, in a lab and one by one."""
    timeout_s: float = 600.0
    """Seconds after which a backend times out."""

    def __post_init__(self) -> None:
        check_between("ranks", self.ranks, 2, 64)
        check_between("seconds", self.seconds, 0.1, 1e5)
        check_between("every_s", self.every_s, 0.01, 1e5)
        check_between("batch", self.batch, 1, 10_000)
        check_between("context", self.context, 1, 10_000)
        check_between("lr", self.lr, 1e-9, 10)
        check_backends(self.backends, self.network, (*BACKENDS, *policies()))
        for name in self.backends:
            self.policy_of(name)
        if self.target is not None:
            check_between("target", self.target, 0.0, 100.0)
        check_subset("wire", self.wires, tuple(WIRES))
        check_between("faults", self.faults, 0.0, 0.9)
        if self.faults and self.network is not None:
            raise BadSetting("faults", "are for loopback only; in a lab, give --loss")
        check_between("patience_s", self.patience_s, 0.1, 1e5)
        check_between("timeout_s", self.timeout_s, 1, 1e6)
        _ = self.size

    @property
    def contenders(self) -> tuple[str, ...]:
        """Backends, with one for each of the wires in place of storm-lossy and of storm-drift."""
        return contenders(self.backends, self.wires)

    def policy_of(self, backend: str) -> Policy | None:
        """Makes the policy of a backend that is the name of one; None for all others."""
        return make_policy(backend, self.policy) if backend in policies() else None

    @property
    def size(self) -> LlamaSize:
        """Size of the model."""
        return LlamaSize(layers=self.layers, width=self.width, heads=max(self.width // 64, 1))


@dataclass(frozen=True, kw_only=True)
class Point:
    """One evaluation of one backend's training, reported immediately."""

    backend: str
    clock_s: float
    """Seconds of training until then."""
    steps: int
    """Steps until then."""
    loss: float
    """Mean cross-entropy of the next byte over what is held out, in nats."""
    arrived: float = 1.0
    """Fraction of the chunks that arrived since the last evaluation."""
    gave_up: bool = False
    """Whether no evaluation arrived within the wait limit; the other fields are those of the last one."""


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
    """Whether the curve ends early: no further evaluation arrived within the wait limit."""
    tcp: str | None
    """Congestion control of its connections, as reported by the kernel; None without TCP."""
    measured: dict[str, Any] | None = None
    """Counters of the lab's network during this training."""

    @classmethod
    def of(cls, points: Sequence[Point], *, params: int, tcp: str | None = None) -> "Curve":
        """Makes a curve of one backend's evaluations, at least one."""
        real = [point for point in points if not point.gave_up]
        after = [point.arrived for point in real[1:]]
        return cls(
            backend=real[0].backend,
            clock_s=[point.clock_s for point in real],
            steps=[point.steps for point in real],
            losses=[point.loss for point in real],
            params=params,
            arrived=sum(after) / len(after) if after else 1.0,
            gave_up=points[-1].gave_up,
            tcp=tcp,
        )

    @property
    def best(self) -> float:
        """Lowest loss that it reached."""
        return min(self.losses)

    @property
    def step_s(self) -> float | None:
        """Mean seconds on the clock for a step; None if none was made."""
        return self.clock_s[-1] / self.steps[-1] if self.steps[-1] else None

    def reached_s(self, loss: float) -> float | None:
        """Seconds until it first reached that loss, interpolated between evaluations; None if it did not."""
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
    """Results with the conditions of their measurement; curves are added one by one."""

    conditions: dict[str, Any]
    curves: list[Curve] = field(default_factory=list)

    @classmethod
    def begin(cls, settings: ConvergenceSettings) -> "ConvergenceReport":
        """Makes a report without any curve.

        Raises:
            stormtorch.checks.BadSetting: There is no training data.
        """
        asked = asdict(settings)
        asked["network"] = "loopback" if settings.network is None else "lab"
        if settings.network is not None:
            asked["requested"] = settings.network.to_json()
        asked["backends"] = list(settings.contenders)
        asked["policy"] = {name: repr(settings.policy_of(name)) for name in settings.backends if name in policies()}
        asked["order"] = TURNS if settings.turns else ONE_BY_ONE
        return cls(asked | {"clock": CLOCK, "step": STEP, "corpus": open_corpus().to_json()} | surroundings())

    @property
    def target(self) -> float | None:
        """Requested target loss, or the lowest that all backends reached that were not aborted; None without any."""
        if self.conditions.get("target") is not None:
            return float(self.conditions["target"])
        ended = [curve.best for curve in self.curves if not curve.gave_up]
        return max(ended) if ended else None

    @property
    def peer(self) -> Curve | None:
        """The first gloo that trained, with which the others are compared."""
        gloos = [curve for curve in self.curves if curve.backend.startswith("gloo")]
        return next((curve for curve in gloos if not curve.gave_up), gloos[0] if gloos else None)

    def reached_s(self, curve: Curve) -> float | None:
        """Seconds until a curve reached the target."""
        return None if self.target is None else curve.reached_s(self.target)

    def speedup(self, curve: Curve) -> float | None:
        """Speed-up to the target over the first gloo."""
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
        """Writes JSON and creates missing folders."""
        write_json(path, self.to_json())

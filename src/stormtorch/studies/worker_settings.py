"""What to simulate, how, and on which network: valid from birth."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from stormtorch.checks import BadSetting, check_between, check_subset
from stormtorch.network.loss import GilbertElliott, LossModel, PerLink, Stragglers, Trace, in_time, loss_in_bursts
from stormtorch.policies import BoundedDrift, GradientAveraging, ModelAveraging
from stormtorch.policies.policy import Policy
from stormtorch.reliability import EXACT, LOSSY, Reliability
from stormtorch.studies.rank_settings import POLICIES
from stormtorch.tasks.kinds import TASKS

WIRES = ("float32", "bfloat16", "float16")
MOST_WORKERS = 8192
"""Networks are drawn link by link, and links are as many as the square of this."""
PRECISIONS = ("float32", "tf32", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class SimSettings:
    """Simulated trainings that share all but policy and seed."""

    model: str = "llama"
    """One of `stormtorch.tasks.kinds.TASKS`."""
    data: Path | None = None
    """What it learns from; None is what every machine has."""
    workers: int = 64
    policies: tuple[str, ...] = ("lossless", "lead")
    """Trained one after the other, from the same weights and on the same batches."""
    steps: int = 200
    seeds: int = 1
    """Trainings of each policy. Each seed has weights, batches and loss of its own."""
    first_seed: int = 0
    loss: float = 0.1
    """Fraction of the chunks that is lost on every link."""
    burst: float = 1.0
    """Mean length of a run of losses; 1 is independent loss."""
    network: LossModel | None = None
    """A loss model instead of `loss` and `burst`."""
    lead: float = 1.0
    """By how much the policy "lead" leads, in terms of the mean lag p/(1-p)."""
    budget: float = 1.0
    """Fraction of each message of the broadcast that may be missing; 1 repairs nothing."""
    gradient_budget: float = 1.0
    """The same of gradients."""
    weights: Literal["mean", "horvitz-thompson"] = "mean"
    max_lag: int | None = None
    guard: float | None = 0.5
    wire: str = "float32"
    every: int = 1
    """Steps between two averagings of models."""
    optimizer: Literal["task", "adamw", "nadam", "momentum", "sgd"] = "task"
    """The task's own, or another: SGD with momentum 0.9 or without."""
    batch: int | None = None
    """Examples of each worker in a step; this and the next ones are the model's own choice where they are None."""
    lr: float | None = None
    context: int | None = None
    width: int | None = None
    layers: int | None = None
    held_out: int | None = None
    device: str = "cpu"
    precision: Literal["float32", "tf32", "bfloat16"] = "float32"
    how: Literal["auto", "batched", "loop"] = "auto"
    at_once: int | None = None
    fuse: bool = False

    def __post_init__(self) -> None:
        check_subset("model", (self.model,), TASKS)
        check_between("workers", self.workers, 2, MOST_WORKERS)
        check_subset("policy", self.policies, POLICIES)
        check_between("steps", self.steps, 1, 10_000_000)
        check_between("seeds", self.seeds, 1, 1000)
        check_between("first_seed", self.first_seed, 0, 1_000_000_000)
        check_between("loss", self.loss, 0.0, 0.9)
        if self.burst != 1.0 and not self.loss:
            raise BadSetting("burst", "needs a --loss that comes in bursts")
        try:
            GilbertElliott(p=self.loss, burst=self.burst)
        except ValueError as error:
            raise BadSetting("burst", str(error).removeprefix("burst ")) from error
        check_between("lead", self.lead, 0.0, 10.0)
        check_between("budget", self.budget, 0.0, 1.0)
        check_between("gradient_budget", self.gradient_budget, 0.0, 1.0)
        check_subset("weights", (self.weights,), ("mean", "horvitz-thompson"))
        if self.max_lag is not None:
            check_between("max_lag", self.max_lag, 1, 1_000_000)
        if self.guard is not None and not 0.0 < self.guard < 1.0:
            raise BadSetting("guard", f"must lie in (0, 1) or be None, got {self.guard!r}")
        check_subset("optimizer", (self.optimizer,), ("task", "adamw", "nadam", "momentum", "sgd"))
        check_subset("wire", (self.wire,), WIRES)
        check_between("every", self.every, 1, 1_000_000)
        check_subset("precision", (self.precision,), PRECISIONS)
        check_subset("how", (self.how,), ("auto", "batched", "loop"))
        if self.at_once is not None:
            check_between("at_once", self.at_once, 1, self.workers)
        try:
            device = torch.device(self.device)
        except RuntimeError as error:
            raise BadSetting("device", f"must be cpu or cuda, got {self.device!r}") from error
        if device.type not in ("cpu", "cuda"):
            raise BadSetting("device", f"must be cpu or cuda, got {self.device!r}")
        if device.type == "cuda" and not torch.cuda.is_available():
            raise BadSetting("device", "is cuda, but torch finds no GPU here")
        reached = in_time(self.loss_model())
        if isinstance(reached, PerLink) and reached.links:
            highest = max(max(link) for link in reached.links)
            if highest >= self.workers:
                raise BadSetting("per_link", f"names worker {highest}, and there are {self.workers} from 0 on")

    @property
    def trainings(self) -> list[tuple[int, str]]:
        """Seed and policy of each, in order."""
        seeds = range(self.first_seed, self.first_seed + self.seeds)
        return [(seed, policy) for seed in seeds for policy in self.policies]

    def loss_model(self) -> LossModel:
        """Of all links."""
        if self.network is not None:
            return self.network
        return loss_in_bursts(self.loss, self.burst)

    def policy_of(self, name: str) -> Policy:
        """The library's policy of that name."""
        down = LOSSY if self.budget == 1.0 else Reliability(budget=self.budget)
        if name == "model-averaging":
            return ModelAveraging(every=self.every, reliability=down)
        if name == "gradient-averaging":
            return GradientAveraging(reliability=down)
        wire = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[self.wire]
        if name == "lossless":
            return BoundedDrift(gradients=EXACT, broadcast=EXACT, wire=wire)
        return BoundedDrift(
            gradients=LOSSY if self.gradient_budget == 1.0 else Reliability(budget=self.gradient_budget),
            broadcast=down,
            lead=self.lead if name == "lead" else 0.0,
            weights=self.weights,
            max_lag=self.max_lag,
            guard=self.guard,
            wire=wire,
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        found = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "network"}
        found["policies"] = list(self.policies)
        found["data"] = None if self.data is None else self.data.name
        if self.network is not None:
            found["network"] = describe(self.network)
            del found["loss"], found["burst"]
        return found


def describe(network: LossModel) -> str:
    """A loss model in a line, however many links it has."""
    if isinstance(network, PerLink):
        kinds = {type(model).__name__ for model in network.links.values()}
        text = f"PerLink(default={describe(network.default)}, {len(network.links)} links"
        return f"{text} of {', '.join(sorted(kinds))})" if kinds else f"{text})"
    if isinstance(network, Stragglers):
        text = f"Stragglers(chance={network.chance}, delivered={network.delivered}"
        return f"{text}, network={describe(network.network)})"
    if isinstance(network, Trace):
        return f"Trace({len(network.bits)} packets, {sum(network.bits) / len(network.bits):.3f} lost)"
    return repr(network)

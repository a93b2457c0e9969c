"""Settings of studies: trainings that differ only in policy and seed, on ranks or on virtual workers."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch

from stormtorch.checks import BadSetting, blaming, check_between, check_subset
from stormtorch.exchange.reliability import MOST_REDUNDANCY
from stormtorch.network.loss import LossModel, PerLink, Stragglers, Trace, has_timed_bursts, in_time, loss_in_bursts
from stormtorch.policies.policy import Policy
from stormtorch_lab.netns.conditions import Conditions
from stormtorch_lab.policies.presets import WIRES, PolicySettings, make_policy, names
from stormtorch_lab.tasks.data.corpus import open_corpus
from stormtorch_lab.tasks.data.images import open_images
from stormtorch_lab.tasks.kinds import TASKS
from stormtorch_lab.tasks.language import Text
from stormtorch_lab.tasks.pictures import Pictures
from stormtorch_lab.tasks.task import Task, cosine

MOST_WORKERS = 8192
"""Largest number of workers: networks are drawn link by link, and there are as many links as its square."""
# Few enough that ten validations take a small part of a short training.
_HELD_OUT_WINDOWS = 128
_WEIGHT_DECAY = 5e-4
PRECISIONS = ("float32", "tf32", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class StudySettings(PolicySettings):
    """Settings of every study, with those of the policies."""

    policies: tuple[str, ...] = ("lossless", "plain", "lead")
    """Policies to train one after the other, from the same weights and on the same batches: presets, or classes in
    files as `my.py:MyPolicy`."""
    steps: int = 200
    """Optimizer steps of each training."""
    seeds: int = 1
    """Trainings of each policy. Each seed has its own weights, batches and packet loss."""
    first_seed: int = 0
    """First of the seeds; the others follow."""
    loss: float = 0.1
    """Fraction of the datagrams to drop on every link."""
    burst: float | str = 1.0
    """Mean length of a run of losses in packets, or a mean time such as "5ms"; 1 is independent loss."""

    def __post_init__(self) -> None:
        check_between("steps", self.steps, 1, 10_000_000)
        check_between("seeds", self.seeds, 1, 1000)
        check_between("first_seed", self.first_seed, 0, 1_000_000_000)
        check_between("loss", self.loss, 0.0, 0.9)
        if self.burst != 1.0 and not self.loss:
            raise BadSetting("burst", "needs a --loss that comes in bursts")
        try:
            loss_in_bursts(self.loss, self.burst)
        except ValueError as error:
            raise BadSetting("burst", str(error).removeprefix("burst ")) from error
        check_subset("wire", (self.wire,), tuple(WIRES))
        check_between("budget", self.budget, 0.0, 1.0)
        if self.gradient_budget is not None:
            check_between("gradient_budget", self.gradient_budget, 0.0, 1.0)
        check_between("lead", self.lead, 0.0, 10.0)
        if self.redundancy != "auto":
            check_between("redundancy", self.redundancy, 0.0, MOST_REDUNDANCY)
        check_subset("weights", (self.weights,), ("mean", "horvitz-thompson"))
        if self.max_lag is not None:
            check_between("max_lag", self.max_lag, 1, 1_000_000)
        if self.guard is not None and not 0.0 < self.guard < 1.0:
            raise BadSetting("guard", f"must lie in (0, 1) or be None, got {self.guard!r}")
        check_between("every", self.every, 1, 1_000_000)
        check_subset("shards", (self.shards,), ("equal", "rate"))
        self._check_policies()

    def _check_policies(self) -> None:
        if not self.policies:
            raise BadSetting("policy", f"must name at least one of {', '.join(names())}, or a class in a file")
        if len(set(self.labels)) != len(self.policies):
            raise BadSetting("policy", f"must name each only once, got {','.join(self.policies)}")
        for label in self.labels:
            self.policy_of(label)

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of the policies in results, tables and plots; for a class in a file, its name."""
        return tuple(label_of(name) for name in self.policies)

    @property
    def trainings(self) -> list[tuple[int, str]]:
        """Seed and label of each training; policies alternate, so that other load on the machine affects all alike."""
        seeds = range(self.first_seed, self.first_seed + self.seeds)
        return [(seed, label) for seed in seeds for label in self.labels]

    def typed(self, label: str) -> str:
        """Name of a policy as given; an unknown label is returned as it is."""
        return next((name for name in self.policies if label_of(name) == label), label)

    def policy_of(self, label: str) -> Any:
        """Makes the policy of that label with these settings; the simulator also takes a function of the step.

        Raises:
            BadSetting: There is no such policy, or one of its settings is not valid.
        """
        name = self.typed(label)
        settings = PolicySettings(**{each.name: getattr(self, each.name) for each in fields(PolicySettings)})
        try:
            policy: Policy = make_policy(name, settings)
        except ValueError as error:
            raise named(error) from error
        except Exception as error:  # importing the user's file may raise anything
            raise BadSetting("policy", f"cannot be {name}: {type(error).__name__}: {error}") from error
        return policy

    def key_of(self, label: str) -> str:
        """Name of a policy's files. For a class it depends on the source, so an edited policy counts as another one."""
        name = self.typed(label)
        if name in names():
            return name
        path = Path(name.rpartition(":")[0])
        return f"{label}-{hashlib.sha256(path.read_bytes()).hexdigest()[:8]}"

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        found = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("network", "given")}
        found["policies"] = list(self.policies)
        found["gradient_budget"] = self.budget if self.gradient_budget is None else self.gradient_budget
        found["policy_settings"] = {label: repr(self.policy_of(label)) for label in self.labels}
        return found


def label_of(name: str) -> str:
    """Label of a policy; for a class in a file, its name."""
    return name.rpartition(":")[2] if ":" in name else name


def named(error: ValueError) -> ValueError:
    """Turns an error whose message begins with the name of a setting into a `BadSetting`; returns others."""
    if isinstance(error, BadSetting):
        return error
    knob, _, problem = str(error).partition(" ")
    knob = knob.rstrip(":")
    known = {each.name for each in fields(PolicySettings)} | {"checkpoint", "policy", "workers", "at_once"}
    return BadSetting(knob, problem) if knob in known else error


# --- on ranks ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TrainSettings(StudySettings):
    """Settings of trainings on ranks."""

    ranks: int = 4
    """Processes of this machine, or hosts of a lab with one process each."""
    batch: int = 32
    """Examples of each rank per step. With few, gradient noise hides the effect of packet loss."""
    lr: float = 1e-3
    """Highest learning rate: it rises in the first twentieth of the steps and falls to a tenth, as a cosine."""
    data: Path | None = None
    """File or folder to learn from; None is what every machine has."""
    network: Conditions | None = None
    """Conditions of a lab, including `loss` and `burst`; None is loopback with injected loss."""
    timeout_s: float = 3600.0
    """Seconds after which the study times out."""

    def __post_init__(self) -> None:
        check_between("ranks", self.ranks, 2, 64)
        check_between("batch", self.batch, 1, 65536)
        check_between("lr", self.lr, 1e-9, 100)
        check_between("timeout_s", self.timeout_s, 1, 1e6)
        super().__post_init__()

    def open_task(self) -> Task:
        """Reads the data, and makes the task.

        Raises:
            BadSetting: The data cannot be read.
        """
        raise NotImplementedError(f"{type(self).__name__} has no task: use LmSettings or ImageSettings")

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return super().to_json() | {"data": None if self.data is None else str(self.data)}


@dataclass(frozen=True, kw_only=True)
class LmSettings(TrainSettings):
    """Settings of a language model that learns the next byte of a text."""

    context: int = 64
    """Bytes of each example."""
    layers: int = 2
    width: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_between("context", self.context, 2, 4096)
        check_between("layers", self.layers, 1, 100)
        check_between("width", self.width, 16, 8192)
        if self.width % 16:
            raise BadSetting("width", f"must be a multiple of 16, got {self.width}")

    def open_task(self) -> Task:
        """See `TrainSettings`."""
        with blaming("data", "text"):
            corpus = open_corpus(self.data)
        return Text(
            corpus,
            width=self.width,
            layers=self.layers,
            batch=self.batch,
            lr=self.lr,
            context=self.context,
            held_out=_HELD_OUT_WINDOWS,
            own_generators=True,
        )


@dataclass(frozen=True, kw_only=True)
class ImageSettings(TrainSettings):
    """Settings of a ResNet-20 that classifies images: CIFAR-10's, or scikit-learn's digits, 8 x 8."""

    batch: int = 16
    lr: float = 0.1

    def open_task(self) -> Task:
        """See `TrainSettings`."""
        with blaming("data", "cifar10"):
            images = open_images(self.data)
        return Pictures("resnet20", images, batch=self.batch, lr=self.lr, weight_decay=_WEIGHT_DECAY, schedule=cosine)


# --- on virtual workers -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SimSettings(StudySettings):
    """Settings of simulated trainings."""

    policies: tuple[str, ...] = ("lossless", "lead")
    model: str = "llama"
    """Model to train: one of `stormtorch_lab.tasks.kinds.TASKS`."""
    data: Path | None = None
    """File or folder to learn from; None is what every machine has."""
    workers: int = 64
    """Simulated ranks, each with its own replica."""
    network: LossModel | None = None
    """Loss model in place of `loss` and `burst`."""
    optimizer: Literal["task", "adamw", "nadam", "momentum", "sgd"] = "task"
    """Optimizer: the task's own, or another; SGD with momentum 0.9 or without."""
    batch: int | None = None
    """Examples of each worker in a step; None, here and in the next five, takes the default of the model."""
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
    deterministic: bool = False

    def __post_init__(self) -> None:
        check_subset("model", (self.model,), TASKS)
        check_between("workers", self.workers, 2, MOST_WORKERS)
        super().__post_init__()
        check_subset("optimizer", (self.optimizer,), ("task", "adamw", "nadam", "momentum", "sgd"))
        check_subset("precision", (self.precision,), PRECISIONS)
        check_subset("how", (self.how,), ("auto", "batched", "loop"))
        if self.at_once is not None:
            check_between("at_once", self.at_once, 1, self.workers)
        _check_device(self.device)
        reached = in_time(self.loss_model())
        if has_timed_bursts(reached):
            name = "burst" if self.network is None else "per_link"
            raise BadSetting(name, "must be in packets, not in time: virtual workers have no clock")
        if isinstance(reached, PerLink) and reached.links:
            highest = max(max(link) for link in reached.links)
            if highest >= self.workers:
                raise BadSetting("per_link", f"names worker {highest}; the workers are 0 to {self.workers - 1}")

    def loss_model(self) -> LossModel:
        """Loss model of all links."""
        return loss_in_bursts(self.loss, self.burst) if self.network is None else self.network

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        found = super().to_json() | {"data": None if self.data is None else self.data.name}
        if self.network is not None:
            found["network"] = describe(self.network)
            del found["loss"], found["burst"]
        return found


def _check_device(name: str) -> None:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise BadSetting("device", f"must be cpu or cuda, got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise BadSetting("device", f"must be cpu or cuda, got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BadSetting("device", "is cuda, but torch finds no GPU on this machine")


def describe(network: LossModel) -> str:
    """Describes a loss model in one line, even with many links."""
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

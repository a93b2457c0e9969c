"""What to train, how, and on which network: valid from birth."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stormtorch.checks import BadSetting, check_between, check_subset
from stormtorch.lab.conditions import Conditions
from stormtorch.network.faults import faults
from stormtorch.tasks.batches import Task, open_language, open_pictures

POLICIES = ("lossless", "plain", "lead", "model-averaging", "gradient-averaging")
"""What can be compared, from the most careful to the least."""
WIRES = ("float32", "bfloat16", "int8")


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """What all trainings share."""

    ranks: int = 4
    """Each a process of this machine, or on a host of its own in a lab."""
    policies: tuple[str, ...] = ("lossless", "plain", "lead")
    """Trained one after the other, from the same weights and on the same batches."""
    seeds: int = 1
    """Trainings of each policy. Each seed has weights, batches and loss of its own."""
    steps: int = 200
    batch: int = 32
    """Examples of each rank in a step. With few of them, the noise of the gradients hides what loss does."""
    lr: float = 1e-3
    """The highest learning rate: it rises in the first twentieth of the steps and falls to a tenth, as a cosine."""
    loss: float = 0.1
    """Fraction of the datagrams that is lost on every link."""
    burst: float = 1.0
    """Mean length of a run of losses; 1 is independent loss."""
    wire: str = "float32"
    """What lossless, plain and lead send gradients and parameters as; the others send float32."""
    budget: float = 1.0
    """Fraction of each lossy message that may be missing; 1 never sends anything again."""
    max_lag: int | None = None
    """Steps that a parameter may be out of date before it is fetched exactly; None lets it be."""
    network: Conditions | None = None
    """Of a lab, where loss is real; it holds `loss` and `burst`, too. None is loopback with injected loss."""
    timeout_s: float = 3600.0
    """For everything."""

    def __post_init__(self) -> None:
        check_between("ranks", self.ranks, 2, 64)
        check_subset("policies", self.policies, POLICIES)
        check_between("seeds", self.seeds, 1, 1000)
        check_between("steps", self.steps, 1, 10_000_000)
        check_between("batch", self.batch, 1, 65536)
        check_between("lr", self.lr, 1e-9, 100)
        check_between("loss", self.loss, 0.0, 0.9)
        if self.burst != 1.0 and not self.loss:
            raise BadSetting("burst", "needs a --loss that comes in bursts")
        try:
            faults(loss=self.loss, burst=self.burst)
        except ValueError as error:
            raise BadSetting("burst", str(error).removeprefix("burst ")) from error
        check_subset("wire", (self.wire,), WIRES)
        check_between("budget", self.budget, 0.0, 1.0)
        if self.max_lag is not None:
            check_between("max_lag", self.max_lag, 1, 1_000_000)
        check_between("timeout_s", self.timeout_s, 1, 1e6)

    @property
    def trainings(self) -> list[tuple[int, str]]:
        """Seed and policy of each, in order: whatever else the machine does meets all policies alike."""
        return [(seed, policy) for seed in range(self.seeds) for policy in self.policies]

    @property
    def validate_every(self) -> int:
        """Steps from one validation to the next: ten in all."""
        return max(self.steps // 10, 1)

    def open_task(self) -> Task:
        """Reads the data, and makes what is learned.

        Raises:
            BadSetting: The data cannot be read.
        """
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        found = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "network"}
        found["policies"] = list(self.policies)
        return {name: str(value) if isinstance(value, Path) else value for name, value in found.items()}


@dataclass(frozen=True, kw_only=True)
class LmSettings(TrainSettings):
    """A language model that learns the next byte."""

    context: int = 64
    """Bytes of each example."""
    layers: int = 2
    width: int = 64
    text: Path | None = None
    """What to learn from; None is the source of Python's standard library."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_between("context", self.context, 2, 4096)
        check_between("layers", self.layers, 1, 100)
        check_between("width", self.width, 16, 8192)
        if self.width % 16:
            raise BadSetting("width", f"must be a multiple of 16, got {self.width}")

    def open_task(self) -> Task:
        """See `TrainSettings`."""
        return open_language(
            self.text,
            ranks=self.ranks,
            batch=self.batch,
            lr=self.lr,
            context=self.context,
            layers=self.layers,
            width=self.width,
        )


@dataclass(frozen=True, kw_only=True)
class ImageSettings(TrainSettings):
    """ResNet-20 that tells pictures apart."""

    batch: int = 16
    lr: float = 0.1
    cifar10: Path | None = None
    """The folder of CIFAR-10's Python version; None are scikit-learn's digits, 8 x 8."""

    def open_task(self) -> Task:
        """See `TrainSettings`."""
        return open_pictures(self.cifar10, ranks=self.ranks, batch=self.batch, lr=self.lr)

"""The interface of a policy: what ranks send, how owners combine what arrives, and what ranks accept.

A policy is arithmetic on plain tensors, written once: `stormtorch.prepare` applies it to real ranks, the simulator to
virtual workers. Every parameter has one owner among the ranks. In an exchange each rank sends something to the owners
(stage 1, up), an owner combines what arrived of its shard, and sends a result to all ranks (stage 2, down).

Tensors of values are (..., C, E): C chunks of E elements, each of which arrives whole or not at all. Flags, counts and
losses of chunks are (..., C, 1) and broadcast against them, or are one number for all chunks. The last chunk of a shard
may be passed in a separate call, as it has fewer elements. A function may return its argument; it writes into an
argument only where its description allows that.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from stormtorch.checks import check
from stormtorch.exchange.reliability import LOSSY, Priority, Reliability
from stormtorch.policies.class_checks import check_policy_class

WIRES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.int4)  # type: ignore[attr-defined]
"""Number formats in which gradients and parameters may travel."""

Deadline = Literal["auto"] | float | None
"""When gradients of a step are late: after a learned time, after this many seconds, or never."""

Numbers = float | torch.Tensor
"""One number for all chunks, or one for each: (..., C, 1)."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Base of all policies. Subclass `OwnerPolicy` (owners run the optimizer) or `RankPolicy` (every rank runs it)."""

    is_base: ClassVar[bool] = True
    """Whether the class itself is a base for policies."""
    name: ClassVar[str] = ""
    """Name of the policy in commands; a subclass may set one."""
    functions: ClassVar[tuple[str, ...]] = ("send", "combine", "accept", "protect")
    """Names of the functions that a policy may override."""

    reliability: Reliability = LOSSY
    """How much of a message may be missing, in both stages. The default never retransmits."""
    wire: torch.dtype = torch.float32
    """Number format on the network: bfloat16 takes half of the bytes, int8 a quarter, int4 a seventh. Sums: float32."""
    bucket_mb: float = 16.0
    """Size of the buckets in which parameters are sent, each as soon as it is complete. Smaller ones start earlier but
    need more exchanges."""
    overlap: bool = False
    """Whether `step` returns before the parameters have arrived, so that communication overlaps with the next forward:
    each module waits for its own parameters before it runs. Other code that reads parameters, such as a moving average,
    must do so under `exact(model)`, as some may still be in flight."""
    settings: Literal["same", "rank 0", "any"] = "same"
    """What to do if the optimizer's settings (learning rate, weight decay, betas, ...) differ between ranks, at
    `prepare` or at any step: "same" raises an error that names them; "rank 0" gives all ranks the settings of rank 0
    before the step; "any" lets each rank use its own."""
    priority: Priority | None = None
    """Priority of the training's traffic. "low" yields to all other traffic of the network, and needs a job with
    `Options(priority="both")` or of low priority as a whole. None is the job's priority. Control messages of a step,
    some hundred bytes, always have the job's priority."""
    allowed_loss: float | None = None
    """Fraction of the data that ranks may drop rather than wait for it. Steps then hardly become longer beside traffic
    of higher priority, and lose up to that fraction instead, averaged over some steps. Each stage that is not exact
    gets a deadline, which ranks learn from its time without delays. None waits for everything that was sent."""
    warn_every: int = 100
    """Steps between two warnings about a missing rank."""
    give_up_s: float = 600.0
    """Seconds that a rank without a quorum waits for one, before it raises an error that names the missing ranks. Ranks
    that have a quorum continue without the others."""
    collective_wait_s: float = 600.0
    """Time limit of collective calls such as `model.state_dict()`: after these seconds, the call raises an error if a
    rank neither makes it nor waits in another one."""
    drift_samples: int = 256
    """Number of parameter elements that ranks compare at every exchange, to measure the drift of replicas."""

    def __post_init__(self) -> None:
        check_policy_class(self)
        check(self.wire in WIRES, "wire", f"be one of {', '.join(map(str, WIRES))}", self.wire)
        check(self.bucket_mb > 0.0, "bucket_mb", "be above 0", self.bucket_mb)
        check(self.settings in ("same", "rank 0", "any"), "settings", 'be "same", "rank 0" or "any"', self.settings)
        check(self.priority in (None, "normal", "low"), "priority", 'be "normal", "low" or None', self.priority)
        allowed = self.allowed_loss is None or 0.0 < self.allowed_loss < 1.0
        check(allowed, "allowed_loss", "lie in (0, 1) or be None", self.allowed_loss)
        check(self.warn_every >= 1, "warn_every", "be at least 1", self.warn_every)
        check(self.give_up_s > 0.0, "give_up_s", "be above 0", self.give_up_s)
        check(self.collective_wait_s > 0.0, "collective_wait_s", "be above 0", self.collective_wait_s)
        check(self.drift_samples >= 0, "drift_samples", "not be negative", self.drift_samples)

    @property
    def up(self) -> Reliability:
        """Reliability of stage 1, from ranks to owners."""
        return self.reliability

    @property
    def down(self) -> Reliability:
        """Reliability of stage 2, from owners to ranks."""
        return self.reliability

    @property
    def weighs(self) -> bool:
        """Whether the policy overrides `send`. The loss of each link is measured only then."""
        return overrides(self, "send")

    def send(self, own: torch.Tensor, loss: Numbers) -> torch.Tensor:
        """Returns what a rank sends to the owner of some chunks; by default its own values.

        Args:
            own: The rank's gradients or parameters of these chunks.
            loss: Recent measured loss from this rank to the owner; 0 for what the rank itself owns.
        """
        return own

    def combine(self, mean: torch.Tensor, count: Numbers, present: int) -> torch.Tensor:
        """Combines the copies that arrived; by default their mean. May write into `mean`.

        Under an `OwnerPolicy`, an additional parameter `owner` receives the owner's memory of these chunks, which
        starts empty in every view.

        Args:
            mean: Mean over the copies that arrived, always including the owner's own.
            count: Number of copies that arrived.
            present: Number of ranks that take part, as far as known.
        """
        return mean

    def protect(self, loss: float, chunks: int, compression_ratio: float) -> float:
        """Returns the parity chunks per data chunk of a stage without retransmission; by default none.

        A stage whose `Reliability` has a number as `redundancy` uses that instead. On real ranks, called for an
        `OwnerPolicy` only.

        Args:
            loss: Recent measured loss of this rank's datagrams, before decoding.
            chunks: Data chunks of its largest message.
            compression_ratio: Bytes of float32 over those of the wire: 1 for float32, about 4 for int8, 7 for int4.
        """
        return 0.0

    def redundancy_of(self, stage: Reliability, loss: float, chunks: int, compression_ratio: float) -> float:
        """Returns the parity chunks per data chunk of a stage; for the arguments see `protect`."""
        if stage.budget < 1.0:
            return 0.0  # what is lost is retransmitted
        return self.protect(loss, chunks, compression_ratio) if stage.redundancy == "auto" else stage.redundancy

    def accept(self, own: torch.Tensor, received: torch.Tensor, arrived: torch.Tensor) -> torch.Tensor:
        """Returns what a rank continues with; by default what arrived, and its own values where that was lost.

        Args:
            own: The rank's values: a stale copy, or its own gradients or parameters.
            received: What the owners sent. Values that did not arrive are undefined and may be NaN: select by
                `torch.where`, never multiply by zero.
            arrived: Whether each chunk arrived.
        """
        return torch.where(arrived, received, own)


@dataclass(frozen=True, kw_only=True)
class OwnerPolicy(Policy):
    """Base of policies under which owners run the user's optimizer, each on its own shard.

    Gradients go up, parameters come down. The optimizer's state is sharded and exists once. Other ranks have copies of
    an owner's parameters; a lost broadcast makes a copy stale until the next one arrives.
    """

    is_base: ClassVar[bool] = True
    functions: ClassVar[tuple[str, ...]] = (*Policy.functions, "ahead", "publish", "deadline_at")

    gradients: Reliability | None = None
    """Reliability of stage 1, gradients to their owners; None is `reliability`."""
    broadcast: Reliability | None = None
    """Reliability of stage 2, parameters to all ranks; None is `reliability`. With a budget below 1, chunks are
    retransmitted until at most that fraction is missing, or until the deadline."""
    deadline: Deadline = None
    """What to do about stragglers. None waits for them. "auto" continues without their gradients after a deadline that
    is learned from the compute times of the ranks; a straggler's next gradients count for the steps that it missed. A
    number is a deadline in seconds from the arrival of a rank's parameters: gradients computed by then count, once one
    rank has computed all of them. Override `deadline_at` to set one per step. See
    `stormtorch.runtime.owner.deadline_session`."""
    max_lag: int | None = None
    """Bound on the staleness of copies in steps: a copy that would be older is fetched exactly. None: no bound."""
    guard: float | None = 0.5
    """Convergence guard: the broadcast becomes exact while its measured loss exceeds this, or while a copy is older
    than `max_lag`. None disables it."""
    standby: int = 1
    """Hot standbys per shard: 1, or 0 for none. From 3 ranks on, the owner sends its averaged gradient exactly to
    another rank, which runs the same optimizer on it, so that nothing is lost if the owner dies. Without a standby, a
    dead owner's parameters come from the freshest copy, and the optimizer's state of its shard is reset."""
    hierarchy: bool = True
    """Whether exchanges are hierarchical: gradients are averaged inside a machine before they go to owners on others,
    and an owner sends its parameters to each other machine once. It needs several machines with the same number k of
    ranks, two or more, and a model of at least 512 KiB. A machine's link then carries 1/k of the bytes, and only they
    may be lost: a lost chunk of gradients loses those of all ranks of a machine, and one of parameters leaves all of
    them with the same stale copy. Not used by policies that override `accept`, weight gradients by link, or have a
    deadline. False sends everything from rank to rank."""
    ownership: Literal["auto", "elements", "parameters"] = "auto"
    """Granularity of the partition. "elements" may split a parameter between owners, which elementwise optimizers
    allow; others, such as Muon, need whole "parameters". "auto" knows torch's optimizers, and uses "parameters" for
    others."""

    shards: Literal["equal", "rate"] | tuple[float, ...] = "equal"
    """Size of each rank's shard. "equal" gives all ranks the same. "rate" measures the rate of links in each direction
    and the speed of processors, and repartitions, by a view with the same members, whenever that should make steps at
    least a tenth shorter: ranks with a link that is slow in one direction, or a slow processor, then own less. A link
    that is equally slow both ways is best used by an equal shard. A tuple has a weight per rank; on a shared medium
    such as Wi-Fi, a small weight for a slow host pays."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_shards(self.shards)
        check(
            self.ownership in ("auto", "elements", "parameters"),
            "ownership",
            'be "auto", "elements" or "parameters"',
            self.ownership,
        )
        given = isinstance(self.deadline, int | float) and 0.0 < self.deadline < math.inf
        right = given or self.deadline in (None, "auto")
        check(right, "deadline", 'be "auto", a number of seconds above 0, or None', self.deadline)
        check(self.deadline is None or not self.overlap, "overlap", "be False with a deadline", self.overlap)
        check(self.standby in (0, 1), "standby", "be 0 or 1", self.standby)
        check(self.max_lag is None or self.max_lag >= 1, "max_lag", "be at least 1 or None", self.max_lag)
        check(self.guard is None or 0.0 < self.guard < 1.0, "guard", "lie in (0, 1) or be None", self.guard)

    @property
    def up(self) -> Reliability:
        """Reliability of stage 1, gradients to their owners."""
        return self.reliability if self.gradients is None else self.gradients

    @property
    def down(self) -> Reliability:
        """Reliability of stage 2, parameters to all ranks."""
        return self.reliability if self.broadcast is None else self.broadcast

    def deadline_at(self, step: int) -> Deadline:
        """Returns the deadline of a step; by default `deadline`. Not called if `deadline` is None.

        All ranks must return the same value for a step.

        Args:
            step: Number of the step, from 0.
        """
        return self.deadline

    def ahead(self, loss: float) -> float:
        """Returns the lead: by how many updates an owner's broadcast is ahead of its own parameters; by default 0.

        Args:
            loss: Recent measured loss of this owner's broadcasts.
        """
        return 0.0

    def publish(self, before: torch.Tensor, now: torch.Tensor, ahead: Numbers) -> torch.Tensor:
        """Returns what an owner sends after the optimizer's step; by default its parameters, extrapolated by `ahead`
        updates.

        Not called if `ahead` is 0 and this function is the default: then `now` is sent. May write into `before`.

        Args:
            before: The owner's parameters before the step.
            now: The owner's parameters after the step.
            ahead: What `ahead` returned.
        """
        return before.lerp_(now, 1.0 + ahead)


def _check_shards(shards: object) -> None:
    words = '"equal", "rate" or a tuple of weights, none of them negative and one above 0'
    if isinstance(shards, tuple):
        numbers = all(isinstance(each, int | float) and 0.0 <= each < math.inf for each in shards)
        check(numbers and sum(shards) > 0.0, "shards", f"be {words}", shards)
    else:
        check(shards in ("equal", "rate"), "shards", f"be {words}", shards)


def overrides(policy: Policy, name: str) -> bool:
    """Whether a policy replaces the default function of that name."""
    for kind in type(policy).__mro__:
        if kind.__dict__.get("is_base") and hasattr(kind, name):
            return getattr(type(policy), name) is not getattr(kind, name)
    raise AttributeError(f"policies have no function {name!r}")


def takes(function: Callable[..., torch.Tensor], name: str) -> bool:
    """Whether a policy's function has a parameter of that name."""
    return name in inspect.signature(function).parameters


def applied(function: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
    """Calls a policy's function and checks the shape of its result.

    Args:
        function: A method of a policy.
        arguments: Its arguments; the first tensor among them determines the shape.

    Raises:
        TypeError: The result has another type or shape; the message names the policy and the function.
    """
    result: Any = function(*arguments)
    like = next(each for each in arguments if isinstance(each, torch.Tensor))
    if isinstance(result, torch.Tensor) and result.shape == like.shape:
        return result
    got = f"one of shape {tuple(result.shape)}" if isinstance(result, torch.Tensor) else repr(result)
    raise TypeError(f"{function.__qualname__} must return a tensor of shape {tuple(like.shape)}, it returned {got}")

"""The interface of a policy: what ranks send, what owners make of what arrived, and what ranks make of the answer.

A policy is arithmetic on plain tensors, written once: `stormtorch.prepare` applies it to real ranks, the simulator to
virtual workers. Every parameter has one owner among the ranks. In an exchange each rank sends something to the owners
(stage 1, up), an owner combines what arrived of its shard, and sends a result to all ranks (stage 2, down).

Tensors of values are (..., C, E): C chunks, each of which arrives whole or not at all, of E elements. What is known of
chunks (flags, counts, losses) is (..., C, 1) and broadcasts against them, or is one number for all of them. The last
chunk of a shard may come in a call of its own, as it has fewer elements. A function may return the very tensor that it
was given; it writes only into tensors where its description allows that.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from stormtorch.checks import check
from stormtorch.policies.class_checks import check_policy_class
from stormtorch.reliability import LOSSY, Priority, Reliability

WIRES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.int4)  # type: ignore[attr-defined]
"""Number formats in which gradients and parameters may travel."""

Deadline = Literal["auto"] | float | None
"""When gradients of a step are late: after seconds that are learned, after so many seconds, or never."""

Numbers = float | torch.Tensor
"""One number for all chunks, or one for each: (..., C, 1)."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Base of all policies; subclass `OwnerPolicy` or `RankPolicy`, which say who runs the optimizer."""

    is_base: ClassVar[bool] = True
    """Whether a class, by its own definition, is one that policies derive from."""
    name: ClassVar[str] = ""
    """Name by which commands know a policy of the library; a subclass may choose one."""
    functions: ClassVar[tuple[str, ...]] = ("send", "combine", "accept", "protect")
    """Names of the functions that a policy may override."""

    reliability: Reliability = LOSSY
    """How much of a message may be missing, in both stages. The default never sends anything twice."""
    wire: torch.dtype = torch.float32
    """Number format on the network: bfloat16 takes half of the bytes, int8 a quarter, int4 a seventh. Sums: float32."""
    bucket_mb: float = 16.0
    """Size of the buckets in which parameters travel, each as soon as it is complete. Smaller ones start earlier and
    cost more exchanges."""
    overlap: bool = False
    """Whether `step` returns before parameters have arrived, so that they travel during the next forward: each module
    then waits for its own before it runs. Code that reads parameters elsewhere, as a moving average does, would read
    some that are still on their way, and must do so under `exact(model)`."""
    settings: Literal["same", "rank 0", "any"] = "same"
    """What happens where the optimizer's settings (learning rate, weight decay, betas, ...) differ between ranks, at
    `prepare` or at any step: "same" raises an error that names them; "rank 0" gives all ranks the settings of rank 0
    before the step that would use others; "any" lets each rank use its own."""
    priority: Priority | None = None
    """Priority of the training's traffic: "low" yields to everything else on the network, and needs a job that begins
    with `Options(priority="both")` or is of low priority as a whole; None is the job's own priority. What ranks tell
    each other about a step, some hundred bytes, always goes at the job's priority."""
    allowed_loss: float | None = None
    """Fraction of what ranks send each other that they may give up rather than wait for it: steps then hardly become
    longer beside neighbours on the network that come first, and lose up to that fraction instead, on average over some
    steps. Each stage that is not exact gets a deadline, which ranks learn from how long it takes when nothing is
    delayed. None waits for all that was sent."""
    warn_every: int = 100
    """Steps between two warnings about a rank that is missing."""
    give_up_s: float = 600.0
    """Seconds for which a rank that has lost the majority of the others waits for it, before it raises an error that
    names whom it misses. As long as a majority of the ranks is there, these go on without the others."""
    collective_wait_s: float = 600.0
    """Seconds after which a call that all ranks must make, such as `model.state_dict()`, raises an error because a rank
    neither makes it nor waits for the others elsewhere."""
    drift_samples: int = 256
    """Number of parameter elements that ranks compare at every exchange, to measure how far apart replicas are."""

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
        """Whether `send` changes what it is given. The loss of each link is measured only then."""
        return overrides(self, "send")

    def send(self, own: torch.Tensor, loss: Numbers) -> torch.Tensor:
        """Returns what a rank sends to the owner of some chunks; by default its own values.

        Args:
            own: The rank's gradients or parameters of these chunks.
            loss: Measured fraction of this rank's chunks that the owner lost lately; 0 for what the rank itself owns.
        """
        return own

    def combine(self, mean: torch.Tensor, count: Numbers, present: int) -> torch.Tensor:
        """Returns what an owner makes of the copies that arrived; by default their mean. May write into `mean`.

        Under an `OwnerPolicy`, a further parameter `owner` gets what the owner remembers of these chunks. It begins
        anew with every view.

        Args:
            mean: Mean over the copies that arrived, the owner's own always among them.
            count: How many copies arrived.
            present: How many ranks take part, as far as is known.
        """
        return mean

    def protect(self, loss: float, chunks: int, compression_ratio: float) -> float:
        """Returns the parity chunks that a rank sends with each data chunk where nothing is sent again; default: none.

        A stage whose `Reliability` has a number as its `redundancy` sends that many instead. On real ranks, only an
        `OwnerPolicy` is asked.

        Args:
            loss: Measured fraction of this rank's datagrams that was lost lately, before parity brought any back.
            chunks: Data chunks of its largest message.
            compression_ratio: Bytes of float32 over those of the wire: 1 for float32, about 4 for int8, 7 for int4.
        """
        return 0.0

    def redundancy_of(self, stage: Reliability, loss: float, chunks: int, compression_ratio: float) -> float:
        """Returns the parity chunks that a rank sends with each data chunk of a stage; for the others see `protect`."""
        if stage.budget < 1.0:
            return 0.0  # what is lost is sent again
        return self.protect(loss, chunks, compression_ratio) if stage.redundancy == "auto" else stage.redundancy

    def accept(self, own: torch.Tensor, received: torch.Tensor, arrived: torch.Tensor) -> torch.Tensor:
        """Returns what a rank continues with; by default what came, and its own where that was lost.

        Args:
            own: What the rank has: a stale copy, or its own gradients or parameters.
            received: What the owners sent. Where it did not arrive, its values mean nothing and may be NaN: choose by
                `torch.where`, never multiply by zero.
            arrived: Whether each chunk arrived.
        """
        return torch.where(arrived, received, own)


@dataclass(frozen=True, kw_only=True)
class OwnerPolicy(Policy):
    """Base of policies under which owners run the user's optimizer, each on its own shard.

    Gradients go up, parameters come down. The optimizer's state exists once in the world. Other ranks have copies of an
    owner's parameters, which become stale where the broadcast is lost and are healed by the next one that arrives.
    """

    is_base: ClassVar[bool] = True
    functions: ClassVar[tuple[str, ...]] = (*Policy.functions, "ahead", "publish", "deadline_at")

    gradients: Reliability | None = None
    """Reliability of stage 1, gradients to their owners; None is `reliability`."""
    broadcast: Reliability | None = None
    """Reliability of stage 2, parameters to everyone; None is `reliability`. A budget below 1 repairs until at most
    that fraction is missing, or until the deadline."""
    deadline: Deadline = None
    """What happens to a rank that computes more slowly than the others. None waits for it. "auto" goes on without its
    gradients at a deadline that is learned from how long the ranks take: its next gradients count for the steps that it
    missed. A number is a deadline in seconds from when a rank has its parameters; gradients that a rank has computed
    until then count, as soon as one rank has all. A policy may set one for each step, by `deadline_at`. See
    `stormtorch.runtime.owner.deadline_session`."""
    max_lag: int | None = None
    """Steps that a copy may be out of date: one that would be older is fetched exactly. None sets no bound."""
    guard: float | None = 0.5
    """Measured loss of the broadcast above which the broadcast becomes exact until the network is better. It also
    becomes exact while a copy is older than `max_lag`. None never does that."""
    standby: int = 1
    """Ranks that follow the owner of each shard, so that nothing is lost if it dies: 1, or 0 for none. From 3 ranks on,
    the owner sends its averaged gradient exactly to another rank, which runs the same optimizer on it. Without one, a
    dead owner's parameters come from the freshest copy, and the optimizer's state of its shard begins anew."""
    hierarchy: bool = True
    """Whether ranks exchange by machines, where several machines have the same number k of ranks, two or more, and the
    model has 512 KiB or more: gradients are averaged inside a machine before they go to owners on others, and an owner
    sends its parameters to each other machine once, where they are passed on. A machine's line then carries 1/k of the
    bytes, and only what it carries may be lost: one lost chunk of gradients takes those of all ranks of a machine, and
    one of parameters leaves all of them with the same stale copy. Policies that override `accept`, weigh
    gradients by link, or have a deadline, go without. False sends everything from rank to rank."""
    ownership: Literal["auto", "elements", "parameters"] = "auto"
    """Whether shards may cut through a parameter. Optimizers that treat each element by itself allow it; others, such
    as Muon, need whole parameters. "auto" knows torch's own optimizers, and gives others whole parameters."""

    shards: Literal["equal", "rate"] | tuple[float, ...] = "equal"
    """How much each rank owns. "equal" gives all ranks the same. "rate" measures what lines carry in each direction and
    how fast processors are, and cuts shards anew, by a view with the same members, whenever that should make steps at
    least a tenth shorter: ranks whose line is thin in one direction, or whose processor is slow, then own less. A line
    that is thin both ways alike is best used by an equal share. A tuple has a weight for each rank; where in and out
    share a medium, as in Wi-Fi, a small one for a slow host pays."""

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
        """Reliability of stage 2, parameters to everyone."""
        return self.reliability if self.broadcast is None else self.broadcast

    def deadline_at(self, step: int) -> Deadline:
        """Returns the deadline of a step; by default `deadline`. It is not asked where `deadline` is None.

        All ranks must return the same for a step.

        Args:
            step: Number of the step, from 0.
        """
        return self.deadline

    def ahead(self, loss: float) -> float:
        """Returns by how many updates an owner's broadcast is ahead of its own parameters; by default 0.

        Args:
            loss: Measured fraction of this owner's broadcasts that others lost lately.
        """
        return 0.0

    def publish(self, before: torch.Tensor, now: torch.Tensor, ahead: Numbers) -> torch.Tensor:
        """Returns what an owner sends after the optimizer's step; by default its parameters, `ahead` updates further.

        Not called where `ahead` is 0 and this function is the default: then `now` is sent. May write into `before`.

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
    """Calls a policy's function, and checks that it returns values of the shape that it was given.

    Args:
        function: A method of a policy.
        arguments: What it gets; the first tensor among them says the shape.

    Raises:
        TypeError: It returned something else; the message names the policy and the function.
    """
    result: Any = function(*arguments)
    like = next(each for each in arguments if isinstance(each, torch.Tensor))
    if isinstance(result, torch.Tensor) and result.shape == like.shape:
        return result
    got = f"one of shape {tuple(result.shape)}" if isinstance(result, torch.Tensor) else repr(result)
    raise TypeError(f"{function.__qualname__} must return a tensor of shape {tuple(like.shape)}, it returned {got}")

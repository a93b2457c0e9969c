"""The interface of policies of the local-SGD kind: every rank trains its own model, and ranks exchange at intervals."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from stormtorch.checks import check
from stormtorch.collectives.formats.sparse import Sparse
from stormtorch.policies.memory import NO_MEMORY, Memory
from stormtorch.policies.policy import Numbers, Policy, overrides


@dataclass(frozen=True, kw_only=True)
class RankPolicy(Policy):
    """Base of policies under which every rank runs the user's optimizer on a model of its own.

    Ranks exchange "parameters" every `every` steps, or "gradients" before each step, as `sends` says.
    """

    is_base: ClassVar[bool] = True
    functions: ClassVar[tuple[str, ...]] = (
        *Policy.functions,
        *("update", "order", "sends", "begin_owner", "begin_rank", "sent", "partners", "meet", "met"),
    )
    sends: ClassVar[Literal["gradients", "parameters"]] = "parameters"
    """What the ranks exchange; a subclass chooses it."""
    known: ClassVar[tuple[str, str] | None] = None
    """For policies whose ranks send differences from a value that the owner knows: the name of that value in a rank's
    memory, and the name of its mean over all members in the owner's memory, which is computed again in every view."""
    by_steps: ClassVar[bool] = True
    """Whether a rank's weight in a mean is its number of optimizer steps; a subclass chooses it."""

    every: int = 1
    """Optimizer steps between two exchanges of parameters."""
    fragments: int = 1
    """Number of parts of the model that are exchanged in turn, each every `every` steps."""
    delay: int = 0
    """Optimizer steps between the start of an exchange and the use of its result, so that it overlaps with compute."""
    together_until: int = 0
    """Number of initial steps with an exchange after each of them, as in post-local SGD."""
    pace: Literal["together", "fastest"] = "together"
    """When an exchange begins. "together" waits until every rank has made `every` steps. With "fastest", the first rank
    to have made them begins it, and the others join after their current step: slower ranks make fewer steps and have
    less weight."""
    at_least: int = 1
    """Steps that a rank must have made to take part in an exchange; with fewer, it skips the exchange and keeps its own
    model. Matters only if ranks have different speeds."""
    settings: Literal["same", "rank 0", "any"] = "any"
    """What to do if the optimizer's settings differ between ranks; by default each rank uses its own."""
    seed: int = 0
    """Seed of the generator that `order` and `partners` draw from; the same on all ranks."""
    standby: int = 1
    """Hot standbys of each owner's memory, so that it survives the death of the owner: 1, or 0 for none. Needs three
    ranks or more."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.sends in ("gradients", "parameters"), "sends", 'be "gradients" or "parameters"', self.sends)
        check(self.every >= 1, "every", "be at least 1", self.every)
        check(self.fragments >= 1, "fragments", "be at least 1", self.fragments)
        check(self.delay >= 0, "delay", "not be negative", self.delay)
        check(self.pace in ("together", "fastest"), "pace", 'be "together" or "fastest"', self.pace)
        check(self.at_least >= 0, "at_least", "not be negative", self.at_least)
        check(self.standby in (0, 1), "standby", "be 0 or 1", self.standby)
        if self.sends == "gradients":
            check(self.every == 1, "every", "be 1 if gradients are exchanged", self.every)
            check(self.fragments == 1, "fragments", "be 1 if gradients are exchanged", self.fragments)
            check(self.delay == 0, "delay", "be 0 if gradients are exchanged", self.delay)
            check(self.pace == "together", "pace", 'be "together" if gradients are exchanged', self.pace)
        check(self.fragments <= self.every, "fragments", f"be at most `every`, {self.every}", self.fragments)
        least = self.every // self.fragments
        check(self.delay < least, "delay", f"be less than the {least} steps between two exchanges", self.delay)
        check(self.together_until >= 0, "together_until", "not be negative", self.together_until)
        plain = self.fragments == 1 and self.delay == 0
        check(plain or not self.together_until, "together_until", "be 0 with fragments or delay", self.together_until)
        check(not (self.delay and self.overlap), "overlap", "be False with a delay", self.overlap)
        name = type(self).__name__
        if overrides(self, "update") and overrides(self, "order"):
            raise TypeError(
                f"{name} overrides both update and order: the memory of an owner stays with its shard, but order moves "
                "the shard to another rank; derive it from RankPolicy and keep the default order"
            )
        if self.exchanges_in_pairs and (overrides(self, "update") or overrides(self, "combine")):
            raise TypeError(
                f"{name} overrides partners, and then there are no owners that would call update or combine"
            )
        if self.exchanges_in_pairs:
            check(not self.reports, "sent", "not be overridden beside partners", name)
            check(self.pace == "together", "pace", 'be "together" if ranks exchange in pairs', self.pace)

    def begins_at(self, number: int) -> int:
        """Returns the optimizer step after which an exchange begins, by its number from 0."""
        later = number + 1 - self.together_until
        return number + 1 if later <= 0 else self.together_until - (-later * self.every // self.fragments)

    @property
    def exchanges_in_pairs(self) -> bool:
        """Whether ranks exchange in pairs, without owners."""
        return overrides(self, "partners")

    @property
    def owners_remember(self) -> bool:
        """Whether owners keep state from one exchange to the next."""
        return overrides(self, "update") or overrides(self, "begin_owner")

    @property
    def reports(self) -> bool:
        """Whether owners report to ranks which of their chunks arrived."""
        return overrides(self, "sent")

    @property
    def codes(self) -> tuple[Sparse, Sparse] | None:
        """Sparse codes of the values up and of the results down; None sends all elements in the format of `wire`.

        With codes, NaN elements of `update`'s result are not sent, and ranks receive NaN for them.
        """
        return None

    def order(self, ranks: int, random: torch.Generator) -> list[int]:
        """Returns the rank that owns each shard in the next exchange; by default shard i belongs to rank i.

        Args:
            ranks: Number of ranks.
            random: Generator that draws the same numbers on all ranks.
        """
        return list(range(ranks))

    def partners(self, ranks: int, random: torch.Generator) -> list[int]:
        """Returns each rank's partner in the next exchange, or the rank itself for none; by default none.

        A policy that overrides this has no owners: `accept` gets what the partner sent as `received`.

        Args:
            ranks: Number of ranks.
            random: Generator that draws the same numbers on all ranks.
        """
        return list(range(ranks))

    def meet(self, rank: Memory) -> bytes:
        """Returns what a rank announces to all members when a view begins, such as a public key; by default nothing.

        Args:
            rank: Empty memory whose attributes identify this rank.
        """
        return b""

    def met(self, rank: Memory, everyone: list[bytes]) -> None:
        """Receives what all members announced by `meet`, in the order of the members; by default does nothing.

        Args:
            rank: Empty memory whose attributes identify this rank.
            everyone: Announcement of each member. These are bytes from the network: check them.
        """

    def begin_owner(self, owner: Memory, values: torch.Tensor) -> None:
        """Initialises the memory of an owner; by default it is empty.

        Args:
            owner: Memory of the owner for these chunks.
            values: Initial parameters of the training; those of another rank if the memory was lost with its ranks.
        """

    def begin_rank(self, rank: Memory, values: torch.Tensor) -> None:
        """Initialises the memory of a rank when it starts or rejoins; by default it is empty.

        Args:
            rank: Memory of the rank for these chunks.
            values: Parameters with which it starts.
        """

    def send(self, own: torch.Tensor, loss: Numbers, rank: Memory = NO_MEMORY) -> torch.Tensor:
        """Returns what a rank sends to the owner of some chunks, or to its partner; by default its own values.

        A policy may omit the parameter `rank`.

        Args:
            own: The rank's gradients or parameters of these chunks.
            loss: Recent measured loss from this rank to the owner; 0 for what the rank itself owns.
            rank: Memory of the rank for these chunks.
        """
        return own

    def sent(self, rank: Memory, sent: torch.Tensor, arrived: torch.Tensor) -> None:
        """Receives the owners' exact report of which sent chunks arrived; by default does nothing.

        Args:
            rank: Memory of the rank for these chunks.
            sent: What was sent, rounded to the wire format.
            arrived: Whether each chunk has arrived.
        """

    def update(self, owner: Memory, combined: torch.Tensor) -> torch.Tensor:
        """Returns what an owner sends to all ranks; by default what `combine` returned.

        Args:
            owner: Memory of the owner for these chunks: an anchor, a momentum. It stays with the shard, so only
                policies with a fixed `order` can use it.
            combined: What `combine` returned.
        """
        return combined

    def accept(
        self, own: torch.Tensor, received: torch.Tensor, arrived: torch.Tensor, rank: Memory = NO_MEMORY
    ) -> torch.Tensor:
        """Returns what a rank continues with; by default what arrived, and its own values where that was lost.

        A policy may omit the parameter `rank`.

        Args:
            own: The rank's own gradients or parameters; with a `delay`, as they are at its end.
            received: What the owners sent. Values that did not arrive are undefined and may be NaN: select by
                `torch.where`, never multiply by zero.
            arrived: Whether each chunk arrived.
            rank: Memory of the rank for these chunks.
        """
        return torch.where(arrived, received, own)


def remembers(policy: RankPolicy) -> bool:
    """Whether ranks under a policy keep state from one exchange to the next."""
    return overrides(policy, "begin_rank") or any(takes_rank(getattr(policy, name)) for name in ("send", "accept"))


def with_rank(function: Callable[..., torch.Tensor], rank: Memory) -> Callable[..., torch.Tensor]:
    """Binds the memory of a rank to `send` or `accept` of a policy, if that function takes it."""

    def call(*arguments: Any) -> torch.Tensor:
        return function(*arguments, rank)

    if not takes_rank(function):
        return function
    call.__qualname__ = function.__qualname__
    return call


def takes_rank(function: Callable[..., torch.Tensor]) -> bool:
    """Whether `send` or `accept`, as a policy defines it, takes the memory of a rank."""
    defined_here = getattr(function, "__module__", "") == __name__
    return not defined_here and "rank" in inspect.signature(function).parameters

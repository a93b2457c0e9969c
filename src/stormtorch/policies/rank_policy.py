"""The interface of policies under which every rank trains a model of its own, and exchanges it now and then."""

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

    The ranks exchange what `sends` says: "parameters" after every `every`-th step, or "gradients" before each step.
    """

    is_base: ClassVar[bool] = True
    functions: ClassVar[tuple[str, ...]] = (
        *Policy.functions,
        *("update", "order", "sends", "begin_owner", "begin_rank", "sent", "partners", "meet", "met"),
    )
    sends: ClassVar[Literal["gradients", "parameters"]] = "parameters"
    """What the ranks exchange; a subclass chooses it."""
    known: ClassVar[tuple[str, str] | None] = None
    """For policies whose ranks send differences to what owners know of them: the name under which a rank remembers
    that, and the one under which owners remember its mean over all members, which is counted anew in every view."""
    by_steps: ClassVar[bool] = True
    """Whether a rank counts in a mean by the optimizer steps that it has made; a subclass chooses it."""

    every: int = 1
    """Optimizer steps between two exchanges of parameters."""
    fragments: int = 1
    """Parts of the model that are exchanged in turn, each after every `every`-th step: less at a time, more often."""
    delay: int = 0
    """Optimizer steps between the beginning of an exchange and the use of its result, so that it travels meanwhile."""
    together_until: int = 0
    """Steps at the beginning after each of which all models are exchanged, as post-local SGD does."""
    pace: Literal["together", "fastest"] = "together"
    """When an exchange begins: "together" waits until every rank has made `every` steps. With "fastest", the first rank
    that has made them begins it, and the others join it after the step that they are in: slower ranks make fewer
    steps, and count for less."""
    at_least: int = 1
    """Steps that a rank must have made to take part in an exchange. One that has made fewer sits it out, and goes on
    with its own model. This matters only where ranks have different speeds."""
    settings: Literal["same", "rank 0", "any"] = "any"
    """What happens where the optimizer's settings differ between ranks; by default each rank uses its own."""
    seed: int = 0
    """Seed of the generator that `order` and `partners` draw from; the same on all ranks."""
    standby: int = 1
    """Ranks that follow the owner of each shard where owners remember something, so that it is not lost if one dies: 1,
    or 0 for none. It takes three ranks or more."""

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
            check(self.every == 1, "every", "be 1 where gradients are exchanged", self.every)
            check(self.fragments == 1, "fragments", "be 1 where gradients are exchanged", self.fragments)
            check(self.delay == 0, "delay", "be 0 where gradients are exchanged", self.delay)
            check(self.pace == "together", "pace", 'be "together" where gradients are exchanged', self.pace)
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
                f"{name} overrides both update and order: what an owner remembers stays with its shard, and the order "
                "gives that shard to another rank; derive it from RankPolicy and keep the default order"
            )
        if self.exchanges_in_pairs and (overrides(self, "update") or overrides(self, "combine")):
            raise TypeError(f"{name} overrides partners, so that there are no owners to call update or combine")
        if self.exchanges_in_pairs:
            check(not self.reports, "sent", "not be overridden beside partners", name)
            check(self.pace == "together", "pace", 'be "together" where ranks meet in pairs', self.pace)

    def begins_at(self, number: int) -> int:
        """Returns after how many optimizer steps an exchange begins, by its number from 0 on."""
        later = number + 1 - self.together_until
        return number + 1 if later <= 0 else self.together_until - (-later * self.every // self.fragments)

    @property
    def exchanges_in_pairs(self) -> bool:
        """Whether ranks meet in pairs, so that there are no owners."""
        return overrides(self, "partners")

    @property
    def owners_remember(self) -> bool:
        """Whether owners keep something from one exchange to the next."""
        return overrides(self, "update") or overrides(self, "begin_owner")

    @property
    def reports(self) -> bool:
        """Whether ranks are told what has arrived of what they sent."""
        return overrides(self, "sent")

    @property
    def codes(self) -> tuple[Sparse, Sparse] | None:
        """Sparse codes in which values go up and results come down; None sends all of them, as `wire` says.

        With codes, elements of `update`'s result that are NaN do not travel, and come as NaN.
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
        """Returns the rank that each rank meets in the next exchange, or itself if it meets nobody; by default nobody.

        A policy that overrides this has no owners: a rank gets what its partner has sent as `received`, and `accept` makes
        of it what it likes.

        Args:
            ranks: Number of ranks.
            random: Generator that draws the same numbers on all ranks.
        """
        return list(range(ranks))

    def meet(self, rank: Memory) -> bytes:
        """Returns what a rank tells all members when a view begins, such as a public key; by default nothing.

        Args:
            rank: Says which rank this is; it holds nothing.
        """
        return b""

    def met(self, rank: Memory, everyone: list[bytes]) -> None:
        """Learns what all members have told by `meet`, in the order of their places; by default it does nothing.

        Args:
            rank: Says which rank this is; it holds nothing.
            everyone: What each member has told. These are bytes from the network: check them.
        """

    def begin_owner(self, owner: Memory, values: torch.Tensor) -> None:
        """Begins the memory of an owner; by default it is empty.

        Args:
            owner: Memory of the owner for these chunks.
            values: Parameters with which the training begins. If the memory was lost with the ranks that had it, those
                of another rank.
        """

    def begin_rank(self, rank: Memory, values: torch.Tensor) -> None:
        """Begins the memory of a rank, when it begins or returns; by default it is empty.

        Args:
            rank: Memory of the rank for these chunks.
            values: Parameters with which it begins.
        """

    def send(self, own: torch.Tensor, loss: Numbers, rank: Memory = NO_MEMORY) -> torch.Tensor:
        """Returns what a rank sends to the owner of some chunks, or to its partner; by default its own values.

        A policy may leave out `rank` if it does not need it.

        Args:
            own: The rank's gradients or parameters of these chunks.
            loss: Measured fraction of this rank's chunks that the owner lost lately; 0 for what the rank itself owns.
            rank: Memory of the rank for these chunks.
        """
        return own

    def sent(self, rank: Memory, sent: torch.Tensor, arrived: torch.Tensor) -> None:
        """Learns what has arrived of what a rank sent, as owners report exactly; by default it does nothing.

        Args:
            rank: Memory of the rank for these chunks.
            sent: What was sent, as it is after the rounding of the wire.
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
        """Returns what a rank continues with; by default what came, and its own where that was lost.

        A policy may leave out `rank` if it does not need it.

        Args:
            own: The rank's own gradients or parameters; with a `delay`, as they are at its end.
            received: What the owners sent. Where it did not arrive, its values mean nothing and may be NaN: choose by
                `torch.where`, never multiply by zero.
            arrived: Whether each chunk arrived.
            rank: Memory of the rank for these chunks.
        """
        return torch.where(arrived, received, own)


def remembers(policy: RankPolicy) -> bool:
    """Whether ranks under a policy keep something from one exchange to the next."""
    return overrides(policy, "begin_rank") or any(takes_rank(getattr(policy, name)) for name in ("send", "accept"))


def with_rank(function: Callable[..., torch.Tensor], rank: Memory) -> Callable[..., torch.Tensor]:
    """Gives `send` or `accept` of a policy the memory of a rank, if that function takes it."""

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

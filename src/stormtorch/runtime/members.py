"""Membership: the others continue without a rank that falls silent, give it up after a while, or let it in again.

A rank is missing when its report does not arrive. As long as a rank is missing, the others look into the store at every
step: a rank that wants to return leaves a request there. The lowest rank that is there answers with a step some way
ahead. At that step all ranks begin a new epoch: channels with new names, whose sequence numbers begin anew.
"""

import json
import logging
import time
from dataclasses import dataclass
from typing import Any

from stormtorch.collectives import Group
from stormtorch.errors import StormError
from stormtorch.transport.rendezvous import reincarnate, returned

_log = logging.getLogger("stormtorch")
# Rounds between an answer and the new epoch. As each round needs all reports, no rank is further ahead than that.
_NOTICE_ROUNDS = 3
_POLL_S = 0.05
WITHOUT_OWNER = "its gradients, and its shard of the parameters stays as it is"
"""Words of the warning about a missing rank that owns a shard: what training goes on without."""
# Fraction of `give_up_s`: once a rank has begun the epoch, one that has not done so after this time has died.
_PATIENCE = 0.1


@dataclass(frozen=True)
class Epoch:
    """What every rank must know to begin a new epoch."""

    number: int
    step: int
    """Step at which the epoch begins."""
    members: list[int]
    """Ranks that are there from then on."""
    joins: dict[int, bool]
    """Members that return, and whether each is a new process, which has no parameters yet."""
    root: int
    """Rank that gives new processes the parameters and settings."""

    def __str__(self) -> str:
        returning = ", ".join(f"rank {peer}{' as a new process' if new else ''}" for peer, new in self.joins.items())
        return f"epoch {self.number} begins at step {self.step}: {returning} returns"


class Members:
    """Watches which ranks send reports, and lets missing ones in again.

    Args:
        group: All ranks.
        name: Name of the session.
        warn_every: Steps between two warnings about the same rank.
        give_up_s: Seconds after which a missing rank ends the job.
        every: Steps from one round to the next.
        without: What is missing with a rank, in words for a warning.
    """

    def __init__(
        self,
        group: Group,
        name: str,
        warn_every: int,
        give_up_s: float,
        *,
        every: int = 1,
        without: str = WITHOUT_OWNER,
    ) -> None:
        self.group = group
        self.epoch = 0
        self.cut_off = False
        """Whether this rank hears less than half of the members, so that it is itself the one that is cut off."""
        self._store: Any = getattr(group.transport, "store", None)
        self._name = f"stormtorch/{name}"
        self._warn_every = warn_every
        self._without = without
        self._every = every
        self._give_up_s = give_up_s
        self._members = set(range(group.size))
        self._missing: dict[int, tuple[float, int]] = {}  # since when, and since which step
        self._heard_at = [time.monotonic()] * group.size
        """Time of each rank's last report; before the first, the time of `prepare`."""
        self._next: Epoch | None = None
        incarnation = getattr(group.transport, "incarnation", None)
        self.restarted = incarnation is not None and incarnation(group.transport.rank) > 0
        """Whether this process takes the place of one that died, and has no parameters yet."""

    @property
    def lowest(self) -> int:
        """The lowest rank that is there."""
        return min(self._members)

    # --- ranks that are there ---------------------------------------------------------------------------------------

    def hear(self, heard: set[int], step: int, events: list[str]) -> list[int]:
        """Updates who is missing after the reports of a step.

        Args:
            heard: Other ranks whose reports arrived.
            step: Number of the step.
            events: List to which news are added, in words.

        Returns:
            The missing ranks.

        Raises:
            StormError: A rank has been missing for longer than `give_up_s`.
        """
        now = time.monotonic()
        present = heard | {self.group.rank}
        here = len(present & self._members)
        # If the ranks fall into two halves, the half with the lowest rank continues.
        self.cut_off = 2 * here < len(self._members) or (
            2 * here == len(self._members) and min(self._members) not in present
        )
        if self.cut_off:
            return sorted(self._members - present)
        self._members = present
        for peer in range(self.group.size):
            if peer in present:
                self._heard_at[peer] = now
                if self._missing.pop(peer, None) is not None:
                    events.append(f"rank {peer} is back")
                    _log.warning("rank %d: rank %d is back at step %d", self.group.rank, peer, step)
                continue
            if peer not in self._missing:
                self._missing[peer] = (now, step)
                events.append(f"rank {peer} is missing")
            since, first = self._missing[peer]
            if (step - first) % self._warn_every == 0:
                _log.warning(
                    "rank %d: nothing is heard of rank %d at step %d, and its last report came %.1f s ago: training "
                    "goes on without %s",
                    *(self.group.rank, peer, step, now - self._heard_at[peer], self._without),
                )
            if now - since > self._give_up_s:
                raise self._given_up(
                    peer,
                    f"rank {peer} has been missing for {now - since:.0f} s: restart it, or raise give_up_s "
                    f"({self._give_up_s:g}) to go on without it for longer",
                )
        return sorted(self._missing)

    def look(self, step: int) -> Epoch | None:
        """Returns the epoch that begins at this step, if one does. Every step must call it."""
        if not self._missing or self._store is None:
            return None
        try:
            if self._next is None:
                self._next = self._read(self.epoch + 1)
            if self._next is None and self.group.rank == min(self._members):
                self._answer(step)
        except (RuntimeError, ValueError) as error:
            # The store may have died with its rank: then no rank can return, but the others still continue.
            _log.warning("rank %d: cannot look for ranks that return: %s", self.group.rank, error)
            self._store = None
            return None
        return self._next if self._next is not None and self._next.step == step else None

    def begin(self, epoch: Epoch) -> None:
        """Begins an epoch, and readmits the ranks that return."""
        transport: Any = self.group.transport
        for peer in epoch.joins:
            if peer != self.group.rank:
                rank = self.group.ranks[peer]
                card = returned(self._store, rank, transport.incarnation(rank), prefix=transport.prefix)
                if card is not None:
                    transport.readmit(rank, card)
        if self.group.rank not in epoch.joins:
            self._store.add(self._key("here", epoch.number), 1)
        self.epoch, self._next = epoch.number, None
        self.cut_off = self.restarted = False
        self._members = set(epoch.members)

    def _answer(self, step: int) -> None:
        joins: dict[int, bool] = {}
        for peer in self._missing:
            key = self._key("request", self.epoch, peer)
            if self._store.check([key]):
                joins[peer] = json.loads(self._store.get(key))["restarted"]
        if joins:
            members = sorted(self._members | set(joins))
            epoch = {
                "step": step + _NOTICE_ROUNDS * self._every,
                "members": members,
                "joins": joins,
                "root": self.group.rank,
            }
            self._store.set(self._key("epoch", self.epoch + 1), json.dumps(epoch))
            self._store.set(self._key("latest"), str(self.epoch + 1))

    # --- ranks that return ------------------------------------------------------------------------------------------

    def ask_in(self) -> Epoch:
        """Asks to be let in, and waits until all members are about to begin the epoch that includes this rank.

        Raises:
            StormError: Nobody has answered for `give_up_s`, or there is no store to ask in.
        """
        if self._store is None:
            raise self._given_up(self.group.rank, "it is cut off from the others, and has no store to return by")
        give_up_at = time.monotonic() + self._give_up_s
        _log.warning("rank %d: waits to be let in", self.group.rank)
        asked = -1
        began_at: float | None = None
        try:
            if not self.restarted:
                self._wait_for_life(give_up_at)
                # As long as the old endpoint answers pings, the others wait for messages that it will never send.
                reincarnate(self.group.transport)  # type: ignore[arg-type]  # only a UDP transport has a store
            while time.monotonic() < give_up_at:
                # An answer to an earlier request does not count: another process may have made that one.
                epoch = self._read(asked + 1) if asked >= 0 else None
                if epoch is None or self.group.rank not in epoch.joins:
                    latest = self._latest()
                    if latest > asked:
                        asked = latest
                        request = json.dumps({"restarted": self.restarted})
                        self._store.set(self._key("request", asked, self.group.rank), request)
                else:
                    here = self._store.add(self._key("here", epoch.number), 0)
                    began_at = time.monotonic() if here and began_at is None else began_at
                    if here >= len(epoch.members) - len(epoch.joins):
                        return epoch
                    if began_at is not None and time.monotonic() - began_at > _PATIENCE * self._give_up_s:
                        return epoch
                time.sleep(_POLL_S)
        except RuntimeError as error:
            raise self._given_up(self.group.rank, f"it is cut off, and the store does not answer: {error}") from error
        raise self._given_up(
            self.group.rank, f"nobody has let it in for {self._give_up_s:g} s (give_up_s): does the job still run?"
        )

    def _wait_for_life(self, give_up_at: float) -> None:
        """Waits for a ping of the others, who ping missing ranks: let in before, this rank would be lost again."""
        health = self.group.transport.health
        before = health()["authenticated"]  # datagrams of strangers are no sign of life
        while time.monotonic() < give_up_at and health()["authenticated"] == before:
            time.sleep(_POLL_S)

    def _latest(self) -> int:
        key = self._key("latest")
        return int(self._store.get(key)) if self._store.check([key]) else 0

    def _read(self, number: int) -> Epoch | None:
        key = self._key("epoch", number)
        if not self._store.check([key]):
            return None
        told = json.loads(self._store.get(key))
        joins = {int(peer): bool(restarted) for peer, restarted in told["joins"].items()}
        return Epoch(number, told["step"], told["members"], joins, told["root"])

    def _key(self, *parts: object) -> str:
        return "/".join([self._name, *map(str, parts)])

    def _given_up(self, peer: int, why: str) -> StormError:
        error = StormError(f"rank {self.group.rank}: {why}")
        error.culprit = self.group.ranks[peer]
        return error

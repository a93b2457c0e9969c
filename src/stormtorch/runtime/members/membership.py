"""Membership of one session: the view that it trains in, and the round at which it applies the next one.

The engines of all ranks agree on views, numbered lists of members (docs/membership.md). A session counts *rounds*:
exchanges after which every rank is at the same point of its training. A view names the round at which each session
begins in it. A rank that is behind first makes its earlier rounds in the old view, where dead ranks count as lost. A
rank outside the latest view must not act: it waits until a later view includes it.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stormtorch.collectives import Group
from stormtorch.errors import Closed, StormError
from stormtorch.exchange.reliability import Priority

_log = logging.getLogger("stormtorch")
_SLICE_S = 0.2
_ANNOUNCE_AFTER_S = 10.0
_FOR_ADMISSION = "to be admitted again by a majority of the ranks"


class Left(SystemExit):
    """Ends the program of a rank that leaves, once it has transferred its shards or owns none."""


@dataclass(frozen=True, slots=True)
class View:
    """The members of a session, and the step from which they train together."""

    number: int
    """Number of the view: the first one is 1, and later ones have higher numbers."""
    members: tuple[int, ...]
    """Ranks of the transport, in rising order."""
    step: int
    """Number of optimizer steps at which it began on this rank."""
    base: int = 0
    """Number of the view that its members come from: the last one that was settled on all of them."""


class SessionMembership:
    """The views of one session.

    Args:
        group: The ranks with which the session began.
        name: Name of the session, the same on all ranks.
        give_up_s: Wait limit for a quorum or an admission; then an error is raised.
        priority: Priority of what the session sends; None is that of the group.
    """

    def __init__(self, group: Group, name: str, give_up_s: float, priority: Priority | None = None) -> None:
        self.round = 0
        """Number of rounds completed; of rounds begun, where a round that has begun is never repeated."""
        self._transport: Any = group.transport
        self.priority = priority or group.priority
        """Priority of what the session sends; None is the job's."""
        self._transport.low_lane(self.priority)  # raises an error where the job has no such priority
        self._rank = group.transport.rank
        self._id = zlib.crc32(name.encode())
        # Ranks that join a job belong to the sessions of all ranks, not to those of some.
        all_ranks = set(group.ranks) >= set(range(group.transport.world))
        self._scope = None if all_ranks else frozenset(group.ranks)
        self._give_up_s = give_up_s
        self._no_quorum_since: float | None = None
        self._transport.enter()
        self._transport.watch()
        self.newcomer = self._transport.incarnation(self._rank) != 0 and self._is_known()
        """Whether this process joins a running job and has no parameters yet."""
        if self.newcomer:
            self.view, self.settled = View(0, (), 0), 0
        else:
            latest = self._transport.view()
            assert latest is not None, "a process that was there from the start knows the first view"
            self.view, self.settled = View(latest.number, self._members(latest), 0), latest.number
        self.has_waiting_joiners = False
        """Whether the view has members that wait for an iteration to begin, and take no part before."""
        self._transport.add_session(self._id, 0, self.settled)
        weakref.finalize(self, _unenroll, self._transport, self._id).atexit = False

    def _is_known(self) -> bool:
        """Whether other ranks already have this session. Otherwise all ranks begin it together, joiners too."""
        latest = self._transport.view()
        return latest is None or any(session == self._id for session, _, _ in latest.starts)

    @property
    def index(self) -> int:
        """Position of this rank among the members."""
        return self.view.members.index(self._rank)

    def group(self, name: str, interrupted: Callable[[], bool] | None = None, *, small: bool = False) -> Group:
        """Returns the members as a group whose exchanges belong to the view.

        Args:
            name: Name of its sequence of exchanges.
            interrupted: Polled while an exchange is waited for; when it returns True, the wait raises `Interrupted`.
            small: Whether its messages are so small that they use the job's priority instead of the session's.
        """
        return Group(
            self._transport,
            self.view.members,
            name=name,
            view=self.view.number,
            interrupted=interrupted,
            priority=None if small else self.priority,
        )

    # --- rounds -------------------------------------------------------------------------------------------------------

    def due(self) -> bool:
        """Whether a new view begins now for this rank or without it, or the wait for a quorum has timed out."""
        latest = self._transport.view()
        return latest is not None and (self._due(latest) or self._quorum_timed_out())

    def up_to_date(self) -> bool:
        """Whether this session is in the latest view, or can apply it now."""
        latest = self._transport.view()
        return latest is not None and (latest.number <= self.view.number or self._due(latest))

    def is_excluded(self) -> bool:
        """Whether the members have continued without this rank, so that its state is obsolete."""
        latest = self._transport.view()
        later = latest is not None and latest.number > self.view.number
        return later and (not self._transport.inside() or self.blank())

    def cut_off(self) -> bool:
        """Whether the members have continued without this rank, or the wait for a quorum has timed out."""
        latest = self._transport.view()
        if latest.number <= self.view.number:
            return self._quorum_timed_out()
        return not self._transport.inside() or self.blank()

    def complete(self) -> bool:
        """Begins the next round. Returns False if another view begins first, or has begun without this rank."""
        began = time.monotonic()
        announced = 0.0
        while True:
            latest = self._transport.view()
            if self._due(latest):
                return False
            if self._transport.advance(self._id, self.round + 1, self.settled, latest.number):
                self.round += 1
                return True
            # A view is proposed, and this rank has promised to complete no round before it is decided.
            self._transport.wait_view(latest.number, _SLICE_S)
            announced = self._announce(began, announced, "until the ranks have agreed on the members")

    def await_view(self) -> Any:
        """Waits until the latest view includes this rank, and returns it.

        Raises:
            StormError: No such view was decided within `give_up_s`.
            Left: This rank leaves, and has nothing to transfer.
        """
        began = self._no_quorum_since or time.monotonic()
        announced = 0.0
        while True:
            latest = self._transport.view()
            if getattr(self._transport, "leaving", False) and (self.newcomer or not self._transport.inside()):
                raise Left
            if latest is not None and self._quorum_timed_out():
                raise self._timeout_error(time.monotonic() - began, _FOR_ADMISSION)
            if latest is not None and self._transport.inside() and latest.number > self.view.number:
                self._transport.install(latest)
                return latest
            self._transport.wait_view(latest.number if latest else 0, _SLICE_S)
            announced = self._announce(began, announced, _FOR_ADMISSION)

    def base(self, latest: Any) -> tuple[int, int]:
        """Returns the view that all members of `latest` come from, and the round at which `latest` begins."""
        for session, rounds, base in latest.starts:
            if session == self._id:
                return base, rounds
        return 0, self.round

    def waiting(self, latest: Any) -> list[int]:
        """Returns the members of a view without state: they are admitted where an iteration begins."""
        return self._within(latest.blank)

    def takes_part(self, latest: Any) -> list[int]:
        """Returns the members of a view and the ranks that leave with it: all that move shards."""
        return sorted({*self._members(latest), *self._within([rank for rank, _ in latest.leaving])})

    def members_of(self, latest: Any) -> tuple[int, ...]:
        """Returns the members of an engine's view that belong to this session."""
        return self._members(latest)

    def blank(self) -> bool:
        """Whether this rank is new or was excluded, so that its state is obsolete."""
        return bool(self._transport.blank(self._id))

    def enter(self, latest: Any, step: int, members: Sequence[int]) -> None:
        """Enters a view. `settle` follows once every member is known to have the state that it needs.

        Args:
            latest: One of the engine's views.
            step: Optimizer steps at which it begins.
            members: Its members, without those that wait for an iteration to begin.
        """
        self.view = View(latest.number, tuple(members), step, self.base(latest)[0])
        self.has_waiting_joiners = len(members) < len(self._members(latest))

    def skip_view(self, latest: Any) -> None:
        """Skips a view that does not admit this rank, which waits for a later one."""
        self.view = View(latest.number, (), 0)

    def settle(self, rounds: int) -> bool:
        """Settles the view that was entered, at the given round: every member has the state that it needs.

        A session must retain its previous state until its next round is complete: a later view may have been decided
        by ranks that did not know that this one is settled. Returns False if there is such a view already.
        """
        number = self.view.number
        began = time.monotonic()
        announced = 0.0
        while not self._transport.advance(self._id, rounds, number, number):
            if self.superseded(number):
                return False
            self._transport.wait_view(number, _SLICE_S)
            announced = self._announce(began, announced, "until the ranks have agreed on the members")
        self.settled, self.round, self.newcomer = number, rounds, False
        return True

    def finish_superseded(self, rounds: int) -> bool:
        """Settles a superseded view if other ranks have begun a round in it. Returns whether it did.

        They wait for this rank in that round. It has the state that it needs, and makes the round before it applies
        the later view.
        """
        number = self.view.number
        while True:
            latest = self._transport.view()
            base, starts = self.base(latest)
            if latest.number <= number or base != number or starts <= rounds or not self._transport.inside():
                return False
            if self._transport.advance(self._id, rounds, number, latest.number):
                break
            self._transport.wait_view(latest.number, _SLICE_S)
        if self.blank():  # it was excluded meanwhile
            return False
        self.settled, self.round, self.newcomer = number, rounds, False
        return True

    def superseded(self, number: int) -> bool:
        """Whether there is a later view than `number`."""
        return bool(self._transport.view().number > number)

    def obsolete(self, number: int) -> bool:
        """Whether a view cannot settle any more: it is superseded, or the quorum was lost for too long."""
        return self.superseded(number) or self._quorum_timed_out()

    def _due(self, latest: Any) -> bool:
        if latest.number <= self.view.number:
            return False
        return not self._transport.inside() or self.blank() or self.base(latest)[1] <= self.round

    def _quorum_timed_out(self) -> bool:
        """Whether this rank had no quorum for `give_up_s`: without one, no view can be decided."""
        if self._transport.connectivity()["quorum"]:
            self._no_quorum_since = None
            return False
        # In a local variable too: another thread may find the quorum back and reset the member.
        since = self._no_quorum_since = self._no_quorum_since or time.monotonic()
        # A leaving rank stays to serve other ranks' calls, not until it can reach them again.
        draining = self._transport.collective_servers.draining
        wait_limit_s = min(self._give_up_s, self._transport.silence_s) if draining else self._give_up_s
        return time.monotonic() - since > wait_limit_s

    def _members(self, latest: Any) -> tuple[int, ...]:
        return tuple(self._within([rank for rank, _ in latest.members]))

    def _within(self, ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if self._scope is None or rank in self._scope]

    # --- messages -----------------------------------------------------------------------------------------------------

    def _announce(self, began: float, announced: float, what: str) -> float:
        """Logs after a while what this rank waits for. Returns the waiting time at the last warning.

        Raises:
            StormError: It has waited for `give_up_s`.
        """
        waited = time.monotonic() - began
        if waited > self._give_up_s:
            raise self._timeout_error(waited, what)
        if waited < max(_ANNOUNCE_AFTER_S, 2 * announced):
            return announced
        _log.warning("rank %d: waits %s, for %.0f s so far; %s", self._rank, what, waited, self.connectivity())
        return waited

    def _timeout_error(self, waited: float, what: str) -> StormError:
        return StormError(
            f"rank {self._rank}: has waited {waited:.0f} s (give_up_s) {what}; {self.connectivity()}: restart the "
            "ranks that are gone, or raise give_up_s"
        )

    def connectivity(self) -> str:
        """Describes for messages which members this rank receives from."""
        connectivity = self._transport.connectivity()
        silence_s = self._transport.silence_s
        latest = self._transport.view()
        others = [rank for rank, _ in latest.members if rank != self._rank] if latest is not None else []
        last_received = connectivity["heard_s"]
        silent = [rank for rank in others if last_received.get(rank) is None or last_received[rank] > silence_s]
        if not silent:
            return (
                "all members are reachable" if connectivity["quorum"] else "members have left, so there is no majority"
            )
        since = max((last_received[rank] for rank in silent if last_received.get(rank) is not None), default=0.0)
        majority = "" if connectivity["quorum"] else ", which leaves it without a majority"
        return f"nothing was received from rank {', '.join(map(str, silent))} for {since:.0f} s{majority}"


def _unenroll(transport: Any, session: int) -> None:
    with contextlib.suppress(Closed):
        transport.remove_session(session)

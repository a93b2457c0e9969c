"""The sessions of one process, and the order in which its program makes their rounds.

A program may prepare several models, as a GAN does, or one with several optimizers. Then its sessions enter a view one
after the other at one point of the program, in the order in which they were prepared: a session that entered alone
would wait for a rank that waits for it in another one.

A *turn* is what the program's loop does once, such as five steps of a critic and one of a generator. It begins with a
round of the session that made the very first one, where all have stepped and another has made a round since. A
program that has just come into the job, or was away, can only go on with the others where a turn begins. A view that
begins elsewhere goes without it, and the others ask for another view where their next turn begins.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from stormtorch.runtime.members.membership import Left, SessionMembership

# A session that makes so many rounds in a row, and so many times its longest row before, is trained alone from now on.
_ALONE, _ALONE_TIMES = 256, 4


class IterationSession(Protocol):
    """What a process must know of its sessions."""

    membership: SessionMembership

    @property
    def has_no_pending_step(self) -> bool:
        """Whether no averaged gradients wait for a step, so that a view could begin with this session."""
        ...

    def is_between_steps(self) -> bool:
        """Whether this rank is between two steps, so that a view could begin now outside an exchange of gradients."""
        ...

    def can_apply_view(self) -> bool:
        """Whether a view can begin with this session where another one's round is about to begin."""
        ...

    def change(self) -> bool:
        """Begins the latest view, together with all its members. Returns False if this rank had been away."""
        ...

    def switch(self) -> None:
        """Begins the latest view where another session's round is about to begin."""
        ...


_of_transports: weakref.WeakKeyDictionary[Any, Iterations] = weakref.WeakKeyDictionary()


def iterations_of(transport: Any) -> Iterations:
    """Returns the turns of a process, by its transport."""
    iterations = _of_transports.setdefault(transport, Iterations(transport))
    transport.resting = iterations.resting
    return iterations


class Iterations:
    """The turns of one process."""

    def __init__(self, transport: Any) -> None:
        self._transport = weakref.ref(transport)
        self._sessions: list[weakref.ref[IterationSession]] = []
        self._now: IterationSession | None = None
        """The session whose round is about to begin, or under way."""
        self._leader: weakref.ref[IterationSession] | None = None
        self._last: weakref.ref[IterationSession] | None = None
        self._mixed = self._begins = False
        """Whether another than the leader has made a round in this turn; whether the present round begins a turn."""
        self._run = self._count = 0
        self._requested_at = -1
        """Number of rounds so far when this rank last asked for a view with which newcomers come in."""
        self._longest: weakref.WeakKeyDictionary[IterationSession, int] = weakref.WeakKeyDictionary()
        self._decided = 0, False
        self._joined_before = False

    def is_first_join(self) -> bool:
        """Whether this is the first time that the process comes into a running job."""
        first, self._joined_before = not self._joined_before, True
        return first

    def add(self, session: IterationSession) -> None:
        """Adds a session that is prepared."""
        self._sessions = [each for each in self._sessions if each() is not None]
        self._sessions.append(weakref.ref(session))

    def _live(self) -> list[IterationSession]:
        return [session for each in self._sessions if (session := each()) is not None]

    def _others(self, session: IterationSession) -> list[IterationSession]:
        return [each for each in self._live() if each is not session]

    # --- rounds -------------------------------------------------------------------------------------------------------

    def begin(self, session: IterationSession) -> None:
        """Called when a session is about to make a round."""
        self._now = session
        self._begins = (
            self._mixed and self._is_leader(session) and all(each.has_no_pending_step for each in self._live())
        )

    def _is_leader(self, session: IterationSession) -> bool:
        return self._leader is not None and self._leader() is session

    def end(self) -> None:
        """Called when it has made it, or given it up."""
        self._now = None
        self._begins = False

    def made(self, session: IterationSession) -> None:
        """Counts a round, also one that this rank had to leave out because it was away."""
        if self._leader is None or self._leader() is None:
            self._leader = weakref.ref(session)
        self._mixed = not self._begins and (self._mixed or not self._is_leader(session))
        self._count += 1
        if self._last is not None and self._last() is session:
            self._run += 1
            return
        if self._last is not None and (before := self._last()) is not None:
            self._longest[before] = max(self._run, self._longest.get(before, 0))
        self._last, self._run = weakref.ref(session), 1

    def open(self) -> bool:
        """Whether a program that has just come could go on from here: a turn begins."""
        live = self._live()
        if not all(each.has_no_pending_step for each in live):
            return False
        if len(live) <= 1 or self._leader is None:
            return True
        session = self._now
        if session is None or self._last is None:
            return False
        if self._begins:
            return True
        return self._last() is session and self._run >= max(_ALONE, _ALONE_TIMES * self._longest.get(session, 0))

    def admits_joiners(self, number: int) -> bool:
        """Whether this rank says that newcomers can come in with a view: the same for all sessions."""
        if self._decided[0] != number:
            self._decided = number, self.open()
        return self._decided[1]

    def misses_iteration(self, session: IterationSession) -> bool:
        """Whether this rank was away, and its program must end its turn before it can go on with the others."""
        return session.membership.is_excluded() and not self.open()

    # --- views --------------------------------------------------------------------------------------------------------

    def wants_view(self, session: IterationSession) -> bool:
        """Whether a session's round must not begin before another view does.

        Another session is due, newcomers wait for a turn to begin, or this rank wants to leave. A session that is
        behind makes its round first: the others are in the midst of it and wait for this rank, or have ended it.
        """
        if not session.membership.up_to_date():
            return False
        if any(each.can_apply_view() and each.membership.due() for each in self._others(session)):
            return True
        return self._leaves() or self._admits_now()

    def _admits_now(self) -> bool:
        # Once per turn: others may be at something else, in which this rank must take part first.
        return (
            self._requested_at < self._count
            and any(each.membership.has_waiting_joiners for each in self._live())
            and self.open()
        )

    def _leaves(self) -> bool:
        leaves_later = bool(getattr(self._transport(), "leaves_later", False))
        return leaves_later and all(each.has_no_pending_step for each in self._live())

    def resting(self) -> bool:
        """Whether this rank could hand over all now, as no session makes a round or has gradients that wait for a step.

        One session alone hands over in its round.
        """
        live = self._live()
        return len(live) <= 1 or (self._now is None and all(each.has_no_pending_step for each in live))

    def due(self, session: IterationSession) -> bool:
        """Whether a view begins now for this rank, which is between two steps and waits for something else."""
        if not session.is_between_steps() or not session.membership.due():
            return False
        others = self._others(session)
        if not others:
            return True
        if not all(each.is_between_steps() and each.membership.up_to_date() for each in others):
            return False
        return not session.membership.is_excluded() or self.open()

    def change(self, session: IterationSession) -> bool:
        """Begins the latest view with all sessions that can. Returns False if that one's rank had been away.

        Raises:
            Left: This rank has handed over what it owned, and may leave.
        """
        transport: Any = self._transport()
        if not session.membership.due():
            if self._leaves():
                transport.leaves_later = False
                transport.endpoint.request_leave()
                session.membership.await_view()
            elif self._admits_now():
                self._requested_at = self._count
                transport.request_view()
                session.membership.await_view()
        held, left = True, None
        gone: list[IterationSession] = []
        # From the first one again: another view may have come meanwhile.
        while (each := self._next(session, gone)) is not None:
            try:
                if each is session:
                    held = session.change() and held
                else:
                    each.switch()
            except Left as error:
                left = error
                gone.append(each)
        if left is not None:
            raise left
        return held

    def _next(self, session: IterationSession, gone: list[IterationSession]) -> IterationSession | None:
        for each in self._live():
            if each not in gone and (each is session or each.can_apply_view()) and each.membership.due():
                return each
        return None

    def await_view(self, session: IterationSession) -> Any:
        """Waits for a view that a session can begin, and returns it.

        Sessions that were prepared before it begin that view first: they do so on all other ranks.
        """
        while True:
            latest = session.membership.await_view()
            for each in self._live():
                if each is session:
                    break
                if each.can_apply_view() and each.membership.due():
                    each.switch()
            if not session.membership.superseded(latest.number):
                return latest

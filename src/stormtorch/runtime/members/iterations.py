"""Iterations of the training loop: the sessions of one process, and where in the loop ranks can join.

A program may prepare several models, as a GAN does, or one model with several optimizers. Its sessions apply a view
one after the other at one point of the program, in the order in which they were prepared. A session that applied it
alone would deadlock: it would wait for a rank that waits for this rank in another session.

An *iteration* is one pass of the program's loop, such as five steps of a critic and one of a generator. The *leader*
is the session that made the first round of all. An iteration begins with a round of the leader, once no session has a
pending step and another session has made a round since. A rank that joins, or was excluded, can only start where an
iteration begins. A view that begins elsewhere leaves it out, and the members request another view at the beginning of
their next iteration.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from stormtorch.runtime.members.membership import Left, SessionMembership

# After this many consecutive rounds, and this many times its longest earlier run, a session counts as trained alone.
_ALONE, _ALONE_TIMES = 256, 4


class IterationSession(Protocol):
    """What `Iterations` needs of a session."""

    membership: SessionMembership

    @property
    def has_no_pending_step(self) -> bool:
        """Whether no averaged gradients wait for a step, so that this session can apply a view."""
        ...

    def is_between_steps(self) -> bool:
        """Whether this rank is between two steps, so that it can apply a view outside a gradient exchange."""
        ...

    def can_apply_view(self) -> bool:
        """Whether this session can apply a view where another session's round is about to begin."""
        ...

    def change(self) -> bool:
        """Begins the latest view, together with all its members. Returns False if this rank had been excluded."""
        ...

    def switch(self) -> None:
        """Begins the latest view where another session's round is about to begin."""
        ...


_of_transports: weakref.WeakKeyDictionary[Any, Iterations] = weakref.WeakKeyDictionary()


def iterations_of(transport: Any) -> Iterations:
    """Returns the iterations of a process, by its transport."""
    iterations = _of_transports.setdefault(transport, Iterations(transport))
    transport.resting = iterations.resting
    return iterations


class Iterations:
    """Tracks the iterations of one process over all its sessions."""

    def __init__(self, transport: Any) -> None:
        self._transport = weakref.ref(transport)
        self._sessions: list[weakref.ref[IterationSession]] = []
        self._now: IterationSession | None = None
        """Session whose round is about to begin, or running."""
        self._leader: weakref.ref[IterationSession] | None = None
        self._last: weakref.ref[IterationSession] | None = None
        self._mixed = self._begins = False
        """Whether a session other than the leader has made a round in this iteration; whether this round begins one."""
        self._run = self._count = 0
        self._requested_at = -1
        """Number of rounds when this rank last requested a view that admits joiners."""
        self._longest: weakref.WeakKeyDictionary[IterationSession, int] = weakref.WeakKeyDictionary()
        self._decided = 0, False
        self._joined_before = False

    def is_first_join(self) -> bool:
        """Whether this process joins a running job for the first time. Later calls return False."""
        first, self._joined_before = not self._joined_before, True
        return first

    def add(self, session: IterationSession) -> None:
        """Adds a prepared session."""
        self._sessions = [each for each in self._sessions if each() is not None]
        self._sessions.append(weakref.ref(session))

    def _live(self) -> list[IterationSession]:
        return [session for each in self._sessions if (session := each()) is not None]

    def _others(self, session: IterationSession) -> list[IterationSession]:
        return [each for each in self._live() if each is not session]

    # --- rounds -------------------------------------------------------------------------------------------------------

    def begin(self, session: IterationSession) -> None:
        """Called before a session's round."""
        self._now = session
        self._begins = (
            self._mixed and self._is_leader(session) and all(each.has_no_pending_step for each in self._live())
        )

    def _is_leader(self, session: IterationSession) -> bool:
        return self._leader is not None and self._leader() is session

    def end(self) -> None:
        """Called when the round is complete or aborted."""
        self._now = None
        self._begins = False

    def made(self, session: IterationSession) -> None:
        """Counts a round, also one that this rank skipped because it was excluded."""
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
        """Whether an iteration begins here, so that a joining rank could start."""
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
        """Whether this rank can admit joiners with the view `number`. The answer is the same for all its sessions."""
        if self._decided[0] != number:
            self._decided = number, self.open()
        return self._decided[1]

    def misses_iteration(self, session: IterationSession) -> bool:
        """Whether this rank was excluded and its program must finish its iteration before it can rejoin."""
        return session.membership.is_excluded() and not self.open()

    # --- views --------------------------------------------------------------------------------------------------------

    def wants_view(self, session: IterationSession) -> bool:
        """Whether a view must begin before this session's round.

        True if another session must apply a view, if joiners wait for an iteration to begin, or if this rank leaves. A
        session that is behind makes its round first, because the other ranks wait for this rank in that round or have
        completed it.
        """
        if not session.membership.up_to_date():
            return False
        if any(each.can_apply_view() and each.membership.due() for each in self._others(session)):
            return True
        return self._leaves() or self._admits_now()

    def _admits_now(self) -> bool:
        # Once per iteration: other ranks may wait in another operation that this rank must serve first.
        return (
            self._requested_at < self._count
            and any(each.membership.has_waiting_joiners for each in self._live())
            and self.open()
        )

    def _leaves(self) -> bool:
        leaves_later = bool(getattr(self._transport(), "leaves_later", False))
        return leaves_later and all(each.has_no_pending_step for each in self._live())

    def resting(self) -> bool:
        """Whether this rank could transfer all its shards now: no session is in a round or has a pending step.

        A single session transfers them in its round.
        """
        live = self._live()
        return len(live) <= 1 or (self._now is None and all(each.has_no_pending_step for each in live))

    def due(self, session: IterationSession) -> bool:
        """Whether this rank must apply a view now, while it blocks between two steps."""
        if not session.is_between_steps() or not session.membership.due():
            return False
        others = self._others(session)
        if not others:
            return True
        if not all(each.is_between_steps() and each.membership.up_to_date() for each in others):
            return False
        return not session.membership.is_excluded() or self.open()

    def change(self, session: IterationSession) -> bool:
        """Applies the latest view in all sessions that can. Returns False if this rank had been excluded.

        Raises:
            Left: This rank has transferred its shards and may leave.
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
        # Search from the first session each time: a later view may have been decided meanwhile.
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
        """Waits for a view that `session` can apply, and returns it.

        Sessions that were prepared earlier apply it first, as on all other ranks.
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

"""What a transport knows of membership: the agreed view, where this rank's sessions stand, and who hears whom."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import stormtorch._engine as _engine
from stormtorch.errors import Closed

T = TypeVar("T")


class Membership(Protocol):
    """Membership as both transports offer it. Views are agreed between the ranks, by a majority of the last view."""

    def enter(self) -> None:
        """Comes into a running job: for processes that took a place in one, and are ready to train now."""
        ...

    def incarnation(self, peer: int, /) -> int:
        """Number of the process of a rank that this rank knows: 0 is the first."""
        ...

    def install(self, view: _engine.View) -> None:
        """Makes the members of a view that this rank does not know yet its peers."""
        ...

    def watch(self) -> None:
        """Begins to send notes to all peers. A rank that never watches only answers those of others."""
        ...

    def view(self) -> _engine.View | None:
        """Latest view that is usable here; None as long as this process knows none."""
        ...

    def inside(self) -> bool:
        """Whether this process is a member of the latest view, or leaving in it."""
        ...

    def frozen(self) -> bool:
        """Whether the next view is being agreed on, so that no step may be completed."""
        ...

    def wait_view(self, above: int, timeout_s: float | None = None) -> bool:
        """Blocks until a usable view has a number above `above`; False if `timeout_s` has passed."""
        ...

    def enroll(self, session: int, steps: int, settled: int) -> None:
        """Adds a session of this process, at its position."""
        ...

    def withdraw(self, session: int) -> None:
        """Removes a session."""
        ...

    def advance(self, session: int, steps: int, settled: int, view: int) -> bool:
        """Moves a session on. False, with nothing changed, if this process is frozen or `view` is not the latest."""
        ...

    def blank(self, session: int) -> bool:
        """Whether this process came in after others, and what the session holds is of no worth in the view yet."""
        ...

    def ask_in(self, peer: int, incarnation: int, card: bytes) -> None:
        """Asks the members to take a process in; `card` holds what they need to reach it."""
        ...

    def ask_out(self) -> None:
        """Asks the members to go on without this process."""
        ...

    def ask_anew(self) -> None:
        """Asks the members for another view, even with the same members."""
        ...

    def card(self, peer: int, incarnation: int | None = None) -> bytes | None:
        """Card of a process, by default of the one that has the rank in the latest view; None if it is unknown."""
        ...

    def asking(self) -> list[tuple[int, int]]:
        """Rank and incarnation of processes that want in and whose cards are known."""
        ...

    def standing(self) -> dict[str, Any]:
        """Seconds since each rank was heard, whom each says that it hears, and whether this rank hears a quorum."""
        ...


class EndpointMembership(ABC):
    """Membership of a transport that owns an endpoint."""

    endpoint: _engine.Endpoint
    rank: int

    def watch(self) -> None:
        """Begins to send notes to all peers. A rank that never watches only answers those of others."""
        self._ask("watch", self.endpoint.watch)

    def view(self) -> _engine.View | None:
        """Latest view that is usable here; None as long as this process knows none."""
        return self._ask("view", self.endpoint.view)

    def inside(self) -> bool:
        """Whether this process is a member of the latest view, or leaving in it."""
        return self._ask("inside", self.endpoint.inside)

    def frozen(self) -> bool:
        """Whether the next view is being agreed on, so that no step may be completed."""
        return self._ask("frozen", self.endpoint.frozen)

    def wait_view(self, above: int, timeout_s: float | None = None) -> bool:
        """Blocks until a usable view has a number above `above`; False if `timeout_s` has passed."""
        return self._ask("wait_view", lambda: self.endpoint.wait_view(above, timeout_s))

    def enroll(self, session: int, steps: int, settled: int) -> None:
        """Adds a session of this process, at its position."""
        self._ask("enroll", lambda: self.endpoint.enroll(session, steps, settled))

    def withdraw(self, session: int) -> None:
        """Removes a session."""
        self._ask("withdraw", lambda: self.endpoint.withdraw(session))

    def advance(self, session: int, steps: int, settled: int, view: int) -> bool:
        """Moves a session on. False, with nothing changed, if this process is frozen or `view` is not the latest."""
        return self._ask("advance", lambda: self.endpoint.advance(session, steps, settled, view))

    def blank(self, session: int) -> bool:
        """Whether this process came in after others, and what the session holds is of no worth in the view yet."""
        return self._ask("blank", lambda: self.endpoint.blank(session))

    def ask_in(self, peer: int, incarnation: int, card: bytes) -> None:
        """Asks the members to take a process in; `card` holds what they need to reach it."""
        self._ask("ask_in", lambda: self.endpoint.ask_in(peer, incarnation, card))

    def ask_out(self) -> None:
        """Asks the members to go on without this process."""
        self._ask("ask_out", self.endpoint.ask_out)

    def ask_anew(self) -> None:
        """Asks the members for another view, even with the same members."""
        self._ask("ask_anew", self.endpoint.ask_anew)

    def card(self, peer: int, incarnation: int | None = None) -> bytes | None:
        """Card of a process, by default of the one that has the rank in the latest view; None if it is unknown."""
        return self._ask("card", lambda: self.endpoint.card(peer, incarnation))

    def asking(self) -> list[tuple[int, int]]:
        """Rank and incarnation of processes that want in and whose cards are known."""
        return self._ask("asking", self.endpoint.asking)

    def standing(self) -> dict[str, Any]:
        """Seconds since each rank was heard, whom each says that it hears, and whether this rank hears a quorum."""
        return dict(self._ask("standing", self.endpoint.standing))

    @abstractmethod
    def check_owner(self, what: str) -> None:
        """Raises `Closed` in a process that was forked from the one that joined the job."""

    def _ask(self, what: str, call: Callable[[], T]) -> T:
        self.check_owner(what)
        try:
            return call()
        except RuntimeError as error:
            raise Closed(f"rank {self.rank}: {what}: {error}") from error

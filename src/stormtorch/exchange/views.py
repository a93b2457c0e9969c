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

    def add_session(self, session: int, steps: int, settled: int) -> None:
        """Adds a session of this process, at its position."""
        ...

    def remove_session(self, session: int) -> None:
        """Removes a session."""
        ...

    def advance(self, session: int, steps: int, settled: int, view: int) -> bool:
        """Moves a session on. False, with nothing changed, if this process is frozen or `view` is not the latest."""
        ...

    def blank(self, session: int) -> bool:
        """Whether this process came in after others, and what the session holds is of no worth in the view yet."""
        ...

    def request_admission(self, peer: int, incarnation: int, card: bytes) -> None:
        """Asks the members to take a process in; `card` holds what they need to reach it."""
        ...

    def request_leave(self) -> None:
        """Asks the members to go on without this process."""
        ...

    def request_view(self) -> None:
        """Asks the members for another view, even with the same members."""
        ...

    def card(self, peer: int, incarnation: int | None = None) -> bytes | None:
        """Card of a process, by default of the one that has the rank in the latest view; None if it is unknown."""
        ...

    def join_requests(self) -> list[tuple[int, int]]:
        """Rank and incarnation of processes that want in and whose cards are known."""
        ...

    def connectivity(self) -> dict[str, Any]:
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

    def add_session(self, session: int, steps: int, settled: int) -> None:
        """Adds a session of this process, at its position."""
        self._ask("add_session", lambda: self.endpoint.add_session(session, steps, settled))

    def remove_session(self, session: int) -> None:
        """Removes a session."""
        self._ask("remove_session", lambda: self.endpoint.remove_session(session))

    def advance(self, session: int, steps: int, settled: int, view: int) -> bool:
        """Moves a session on. False, with nothing changed, if this process is frozen or `view` is not the latest."""
        return self._ask("advance", lambda: self.endpoint.advance(session, steps, settled, view))

    def blank(self, session: int) -> bool:
        """Whether this process came in after others, and what the session holds is of no worth in the view yet."""
        return self._ask("blank", lambda: self.endpoint.blank(session))

    def request_admission(self, peer: int, incarnation: int, card: bytes) -> None:
        """Asks the members to take a process in; `card` holds what they need to reach it."""
        self._ask("request_admission", lambda: self.endpoint.request_admission(peer, incarnation, card))

    def request_leave(self) -> None:
        """Asks the members to go on without this process."""
        self._ask("request_leave", self.endpoint.request_leave)

    def request_view(self) -> None:
        """Asks the members for another view, even with the same members."""
        self._ask("request_view", self.endpoint.request_view)

    def card(self, peer: int, incarnation: int | None = None) -> bytes | None:
        """Card of a process, by default of the one that has the rank in the latest view; None if it is unknown."""
        return self._ask("card", lambda: self.endpoint.card(peer, incarnation))

    def join_requests(self) -> list[tuple[int, int]]:
        """Rank and incarnation of processes that want in and whose cards are known."""
        return self._ask("join_requests", self.endpoint.join_requests)

    def connectivity(self) -> dict[str, Any]:
        """Seconds since each rank was heard, whom each says that it hears, and whether this rank hears a quorum."""
        return dict(self._ask("connectivity", self.endpoint.connectivity))

    @abstractmethod
    def check_owner(self, what: str) -> None:
        """Raises `Closed` in a process that was forked from the one that joined the job."""

    def _ask(self, what: str, call: Callable[[], T]) -> T:
        self.check_owner(what)
        try:
            return call()
        except RuntimeError as error:
            raise Closed(f"rank {self.rank}: {what}: {error}") from error

"""Membership interface of a transport: the agreed view, this rank's sessions, and which ranks reach which."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import stormtorch._engine as _engine
from stormtorch.errors import Closed

T = TypeVar("T")


class Membership(Protocol):
    """Membership of a job. A majority of the last view, its quorum, agrees on the next view."""

    def enter(self) -> None:
        """Joins the running job's view: a late joiner calls it once it is ready to train."""
        ...

    def incarnation(self, peer: int, /) -> int:
        """Number of a rank's process, as this rank knows it: 0 is the first."""
        ...

    def install(self, view: _engine.View) -> None:
        """Adds the members of a view that this rank does not know yet as peers."""
        ...

    def watch(self) -> None:
        """Starts sending heartbeats to all peers. Without it, a rank only answers those of others."""
        ...

    def view(self) -> _engine.View | None:
        """Latest view that is usable here; None until this process knows one."""
        ...

    def inside(self) -> bool:
        """Whether this process is a member of the latest view, or leaving in it."""
        ...

    def frozen(self) -> bool:
        """Whether a vote on the next view is under way, so that no step may complete."""
        ...

    def wait_view(self, above: int, timeout_s: float | None = None) -> bool:
        """Blocks until a usable view has a number above `above`; False if `timeout_s` has passed."""
        ...

    def add_session(self, session: int, steps: int, settled: int) -> None:
        """Adds a session of this process with its number of steps."""
        ...

    def remove_session(self, session: int) -> None:
        """Removes a session."""
        ...

    def advance(self, session: int, steps: int, settled: int, view: int) -> bool:
        """Advances a session. False, with nothing changed, if this process is frozen or `view` is not the latest."""
        ...

    def blank(self, session: int) -> bool:
        """Whether this process joined late and its session has not received the job's state yet."""
        ...

    def request_admission(self, peer: int, incarnation: int, card: bytes) -> None:
        """Sends the members a join request for a process; `card` holds its addresses and settings."""
        ...

    def request_leave(self) -> None:
        """Requests a view without this process."""
        ...

    def request_view(self) -> None:
        """Requests another view, even with the same members."""
        ...

    def card(self, peer: int, incarnation: int | None = None) -> bytes | None:
        """Card of a process, by default of the one that has the rank in the latest view; None if it is unknown."""
        ...

    def join_requests(self) -> list[tuple[int, int]]:
        """Rank and incarnation of the processes with a pending join request and a known card."""
        ...

    def connectivity(self) -> dict[str, Any]:
        """Seconds since each rank's last message, the ranks that each can reach, and whether this rank has a quorum."""
        ...


class EndpointMembership(ABC):
    """Membership of a transport that owns an endpoint."""

    endpoint: _engine.Endpoint
    rank: int

    def watch(self) -> None:
        """Starts sending heartbeats to all peers. Without it, a rank only answers those of others."""
        self._ask("watch", self.endpoint.watch)

    def view(self) -> _engine.View | None:
        """Latest view that is usable here; None until this process knows one."""
        return self._ask("view", self.endpoint.view)

    def inside(self) -> bool:
        """Whether this process is a member of the latest view, or leaving in it."""
        return self._ask("inside", self.endpoint.inside)

    def frozen(self) -> bool:
        """Whether a vote on the next view is under way, so that no step may complete."""
        return self._ask("frozen", self.endpoint.frozen)

    def wait_view(self, above: int, timeout_s: float | None = None) -> bool:
        """Blocks until a usable view has a number above `above`; False if `timeout_s` has passed."""
        return self._ask("wait_view", lambda: self.endpoint.wait_view(above, timeout_s))

    def add_session(self, session: int, steps: int, settled: int) -> None:
        """Adds a session of this process with its number of steps."""
        self._ask("add_session", lambda: self.endpoint.add_session(session, steps, settled))

    def remove_session(self, session: int) -> None:
        """Removes a session."""
        self._ask("remove_session", lambda: self.endpoint.remove_session(session))

    def advance(self, session: int, steps: int, settled: int, view: int) -> bool:
        """Advances a session. False, with nothing changed, if this process is frozen or `view` is not the latest."""
        return self._ask("advance", lambda: self.endpoint.advance(session, steps, settled, view))

    def blank(self, session: int) -> bool:
        """Whether this process joined late and its session has not received the job's state yet."""
        return self._ask("blank", lambda: self.endpoint.blank(session))

    def request_admission(self, peer: int, incarnation: int, card: bytes) -> None:
        """Sends the members a join request for a process; `card` holds its addresses and settings."""
        self._ask("request_admission", lambda: self.endpoint.request_admission(peer, incarnation, card))

    def request_leave(self) -> None:
        """Requests a view without this process."""
        self._ask("request_leave", self.endpoint.request_leave)

    def request_view(self) -> None:
        """Requests another view, even with the same members."""
        self._ask("request_view", self.endpoint.request_view)

    def card(self, peer: int, incarnation: int | None = None) -> bytes | None:
        """Card of a process, by default of the one that has the rank in the latest view; None if it is unknown."""
        return self._ask("card", lambda: self.endpoint.card(peer, incarnation))

    def join_requests(self) -> list[tuple[int, int]]:
        """Rank and incarnation of the processes with a pending join request and a known card."""
        return self._ask("join_requests", self.endpoint.join_requests)

    def connectivity(self) -> dict[str, Any]:
        """Seconds since each rank's last message, the ranks that each can reach, and whether this rank has a quorum."""
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

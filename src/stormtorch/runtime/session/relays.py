"""Chained collectives of hierarchical exchanges: a background thread begins the second ones when the first have ended.

In a hierarchical exchange, other ranks wait for what this rank forwards. Its program may be computing, evaluating or
waiting in a barrier then, so a background thread forwards.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch

from stormtorch.collectives import Pending
from stormtorch.errors import Closed
from stormtorch.exchange.exchange import ExchangeResult, Transport
from stormtorch.staging.threads import run_soon

Then = Callable[[], Sequence[Pending]]
"""Begins the second collectives. It must not block."""


class Relay(Pending):
    """Two sets of collectives, of which the second begins when all of the first have ended.

    If one of the first fails, none of the second begins, and `wait` raises the error. Peers in the second then wait for
    this rank until another view begins without it, so relays are only for groups with a view.

    Args:
        transport: Carries the exchanges.
        first: Collectives that have begun. Only the relay may wait for them.
        then: Begins the second collectives, on the background thread.
        peers: Ranks on which the first depend.
    """

    def __init__(self, transport: Transport, first: Sequence[Pending], then: Then, peers: Sequence[int]) -> None:
        self.exchanges = 2
        self._transport = transport
        self._first = first
        self._then: Then | None = then
        self._peers = peers
        self._lock = threading.Lock()
        self._aborted = False
        self._second: Future[Sequence[Pending]] = Future()

    def start_second(self) -> None:
        """Waits for the first collectives, and begins the second. Called once, on the background thread."""
        then, self._then = self._then, None
        assert then is not None
        try:
            for each in self._first:
                each.wait()
            with self._lock, torch.no_grad():
                if self._aborted:
                    raise Closed("the collective was aborted")
                second = then()
        except BaseException as error:
            for each in self._first:
                each.cancel()  # so that its memory is free
            self._second.set_exception(error)
        else:
            self._second.set_result(second)

    def wait(self, timeout_s: float | None = None) -> list[ExchangeResult]:
        """Blocks until all have ended. Returns the arrivals of the second; `timeout_s` applies only to those."""
        self._transport.wait_future(self._second, self._peers)
        return [arrival for each in self._second.result() for arrival in each.wait(timeout_s)]

    def stop(self) -> None:
        """Aborts all collectives without waiting for their end; `cancel` also waits."""
        with self._lock:
            self._aborted = True
        for each in self._first:
            each.stop()

    def cancel(self) -> None:
        """Aborts all collectives and waits for their end. Afterwards, the caller owns all tensors again."""
        self.stop()
        self._transport.wait_future(self._second, self._peers)
        if self._second.exception() is None:
            for each in self._second.result():
                each.cancel()

    @property
    def ended(self) -> bool:
        """Whether all are known to have ended, without polling the transport."""
        if not self._second.done():
            return False
        return self._second.exception() is not None or all(each.ended for each in self._second.result())

    def done(self) -> bool:
        """Polls whether all have ended, successfully or not."""
        if not self._second.done():
            return False
        return self._second.exception() is not None or all(each.done() for each in self._second.result())


class Relays:
    """Queue of one session's relays, whose second collectives begin one relay after the other.

    The first collectives of all relays begin at once, before any rank waits for one, so the order of the queue cannot
    cause a deadlock.

    Args:
        transport: Carries the exchanges.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._lock = threading.Lock()
        self._queue: deque[Relay] = deque()
        self._running = False

    def begin(self, first: Sequence[Pending], then: Then, peers: Sequence[int]) -> Relay:
        """Calls `then` on the background thread once all of `first` have ended. Returns at once; see `Relay`."""
        relay = Relay(self._transport, first, then, peers)
        with self._lock:
            if not self._running:
                run_soon(self._transport.in_background(self._run))  # may fail; it waits for this lock
                self._running = True
            self._queue.append(relay)
        return relay

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._running = False
                    return
                relay = self._queue.popleft()
            relay.start_second()
            del relay  # and with it the tensors

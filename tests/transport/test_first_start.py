"""The first start with `rejoin="auto"`: all ranks come as one job, however slow the store is and whoever comes last."""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from conftest import OPTIONS, store_of_threads

from backend_job import free_ports
from stormtorch import Options, connect
from stormtorch.transport import restarting
from stormtorch.transport.udp import UdpTransport

AUTO = replace(OPTIONS, rejoin="auto", timeout_s=20.0)
COUNTER = "storm/generations"


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that wait for others look back several times per second."""
    monkeypatch.setattr(restarting, "_LOOK_EVERY_S", 0.2)


class SlowStore:
    """A store each of whose answers takes a while, after which what it says may no longer be so."""

    def __init__(self, store: Any, delay: Callable[[str, str], None]) -> None:
        self._store, self._delay = store, delay

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if name not in ("add", "check", "get", "set"):
            return found

        def slow(first: Any, *more: Any) -> Any:
            self._delay(name, first if isinstance(first, str) else "")
            said = found(first, *more)
            self._delay(name, first if isinstance(first, str) else "")
            return said

        return slow


class Start:
    """Ranks as threads that all start a job by the same store."""

    def __init__(self, store: Any, world: int) -> None:
        self.came: dict[int, UdpTransport] = {}
        self.errors: dict[int, BaseException] = {}
        self._store, self._world, self._threads = store, world, list[threading.Thread]()

    def rank(self, rank: int, delay: Callable[[str, str], None], options: Options = AUTO) -> None:
        def body() -> None:
            try:
                self.came[rank] = connect(SlowStore(self._store, delay), rank, self._world, options)  # type: ignore[arg-type]
            except BaseException as error:
                self.errors[rank] = error

        self._threads.append(threading.Thread(target=body))
        self._threads[-1].start()

    def close(self) -> None:
        for transport in self.came.values():
            transport.close(0.0)

    def check_one_job(self) -> None:
        """All have come, as the first processes of their ranks, to one job."""
        for thread in self._threads:
            thread.join(60.0)
        assert not self.errors, self.errors
        assert sorted(self.came) == list(range(self._world))
        for transport in self.came.values():
            assert [transport.incarnation(rank) for rank in range(self._world)] == [0] * self._world
        assert len({transport.prefix for transport in self.came.values()}) == 1


def start_with_the_last_card_during_a_look_back(store: Any, options: Callable[[int], Options]) -> Start:
    """Rank 1 looks back while rank 2, the last, comes and the others begin."""
    start, looks, begun = Start(store, 3), threading.Event(), threading.Event()
    met: list[str] = []

    def delay_of_1(operation: str, key: str) -> None:
        if operation == "set" and key.endswith("/card/1"):
            met.append(key)
        if met and operation == "add" and key == COUNTER:
            looks.set()
            assert begun.wait(30.0)

    start.rank(0, lambda *_: None, options(0))
    start.rank(1, delay_of_1, options(1))
    try:
        assert looks.wait(30.0)
        start.rank(2, lambda *_: None, options(2))
        give_up_at = time.monotonic() + 30.0
        while not {0, 2} <= set(start.came) and not start.errors and time.monotonic() < give_up_at:
            time.sleep(0.01)
    finally:
        begun.set()
    return start


def test_a_rank_that_looks_back_as_the_last_card_comes_does_not_take_its_own_start_for_a_running_job() -> None:
    start = start_with_the_last_card_during_a_look_back(store_of_threads(), lambda _: AUTO)
    try:
        start.check_one_job()
    finally:
        start.close()


def test_a_rank_of_this_start_that_answers_at_an_address_of_an_earlier_job_is_not_taken_for_that_job() -> None:
    store, ports = store_of_threads(), free_ports(3)
    for _ in range(2):
        start = start_with_the_last_card_during_a_look_back(store, lambda rank: replace(AUTO, port=ports[rank]))
        try:
            start.check_one_job()
        finally:
            start.close()


@pytest.mark.timeout(120)
def test_many_ranks_with_a_slow_store_come_as_one_job() -> None:
    world, seed = 8, 5
    start = Start(store_of_threads(60.0), world)
    for rank in range(world):
        draw = random.Random(seed * world + rank)
        start.rank(rank, lambda *_, draw=draw: time.sleep(draw.expovariate(100.0)), replace(AUTO, timeout_s=60.0))
    try:
        start.check_one_job()
    finally:
        start.close()

"""The first start with `rejoin="auto"`: all ranks start as one job, with a slow store too and in any order."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from conftest import store_of_threads

from backend_job import free_ports
from first_starts import AUTO, Start, slow_start
from stormtorch import Options
from stormtorch.joining import restarting

COUNTER = "storm/generations"


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that wait for others look back several times per second."""
    monkeypatch.setattr(restarting, "_LOOK_EVERY_S", 0.2)


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
        while not {0, 2} <= set(start.transports) and not start.errors and time.monotonic() < give_up_at:
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


@pytest.mark.thorough
def test_a_rank_of_this_start_that_answers_at_an_address_of_an_earlier_job_is_not_taken_for_that_job() -> None:
    store, ports = store_of_threads(), free_ports(3)
    for _ in range(2):
        start = start_with_the_last_card_during_a_look_back(store, lambda rank: replace(AUTO, port=ports[rank]))
        try:
            start.check_one_job()
        finally:
            start.close()


@pytest.mark.thorough
@pytest.mark.timeout(120)
def test_many_ranks_with_a_slow_store_come_as_one_job() -> None:
    world, seed = 8, 5
    start = slow_start(store_of_threads(60.0), world, seed, 0.01, 60.0)
    try:
        start.check_one_job()
    finally:
        start.close()

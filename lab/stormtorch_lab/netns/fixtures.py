"""Pytest fixtures that make labs.

In a conftest.py:

    pytest_plugins = ["stormtorch_lab.netns.fixtures"]

and in a test:

    def test_training_survives_loss(lab):
        network = lab(hosts=2, rate="100mbit", loss=0.1)
        assert network.run(["python", "train.py"]) == [0, 0]

A lab ends with its test. If this machine cannot run a lab, such tests are skipped with the reason; with
STORMTORCH_REQUIRE_LAB=1 in the environment they fail instead, for use in CI.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest

from stormtorch_lab.netns.access import LabUnavailable, NotForThisUser
from stormtorch_lab.netns.lab import Lab, try_lab

REQUIRE = "STORMTORCH_REQUIRE_LAB"


def lab_or_skip() -> None:
    """Returns if this machine can run a lab; otherwise skips the test, or fails it if labs are required."""
    if reason := _why_not():
        _skip(reason)


def _skip(reason: str) -> NoReturn:
    if os.environ.get(REQUIRE, "0") not in ("", "0"):
        pytest.fail(f"{REQUIRE} is set, but this machine cannot run a lab: {reason}")
    pytest.skip(reason)


@functools.cache
def _why_not() -> str:
    try:
        try_lab()
    except LabUnavailable as error:
        return str(error)
    return ""


@pytest.fixture
def lab() -> Iterator[Callable[..., Lab]]:
    """Factory of labs, with the arguments of `stormtorch_lab.netns.Lab`. They are closed after the test."""
    lab_or_skip()
    with contextlib.ExitStack() as stack:

        def make(hosts: int = 2, *arguments: Any, **keywords: Any) -> Lab:
            try:
                return stack.enter_context(Lab(hosts, *arguments, **keywords))
            except NotForThisUser as error:
                _skip(str(error))

        yield make

"""How a process says goodbye: by an exception that ends it, and not by one that a person at the prompt may mend."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore  # torch.distributed has it, but its types do not

from stormtorch.transport import leaving

pytestmark = pytest.mark.pure

# Stands for one over UDP: what it says is all that counts here.
TRANSPORT = """
from stormtorch.transport import leaving

class Transport:
    store, closed, rank, prefix = None, False, 0, "storm"

    def close(self, linger_s):
        print("closed")

    def part(self):
        print("parted")

transport = Transport()
leaving.say_goodbye_on_error(transport)
"""


def said(*how: str, typed: str | None = None) -> list[str]:
    ended = subprocess.run(
        [sys.executable, *how],
        input=typed,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "NameError" in ended.stderr
    return ended.stdout.split()


def test_a_typo_at_the_prompt_does_not_end_the_job() -> None:
    assert said("-i", "-c", TRANSPORT, typed="typo\nprint('here')\n") == ["here", "parted"]
    assert said("-i", "-c", TRANSPORT + "typo", typed="print('here')\n") == ["here", "parted"]


def test_an_exception_that_ends_the_process_does() -> None:
    assert said("-c", TRANSPORT + "typo") == ["closed", "parted"]


def test_what_a_process_said_when_it_left_is_not_told_of_the_one_that_took_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    incarnations = [0, 0]
    transport: Any = SimpleNamespace(
        store=HashStore(), closed=False, rank=1, prefix="storm", incarnation=incarnations.__getitem__
    )
    transport.close = lambda _linger_s: None
    monkeypatch.setattr(leaving, "_transports", [transport])
    leaving.say_goodbye("ValueError: a bad batch")
    assert leaving.why_left(transport, 1) == "ValueError: a bad batch"
    assert leaving.why_left(transport, 0) == ""
    incarnations[1] = 1
    assert leaving.why_left(transport, 1) == ""

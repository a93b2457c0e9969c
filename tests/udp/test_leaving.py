"""Goodbye of a process: after an exception that ends it, but not at an interactive prompt, where it goes on."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore  # torch.distributed has it, but its types do not

from stormtorch.udp import leaving

pytestmark = pytest.mark.pure

# Stands for one over UDP: what it says is all that counts here.
TRANSPORT = """
from stormtorch.udp import leaving

class Transport:
    store, closed, rank, prefix = None, False, 0, "storm"

    def close(self, linger_s):
        print("closed")

    def drain(self):
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


IN_CHILD = """
import multiprocessing

def child(by_exit):
    namespace = {}
    exec(TRANSPORT, namespace)
    try:
        raise MemoryError("no memory")
    except MemoryError:
        if by_exit:
            raise SystemExit(1)
        raise

if __name__ == "__main__":
    process = multiprocessing.get_context(how).Process(target=child, args=(by_exit,))
    process.start()
    process.join()
    typo
"""


@pytest.mark.parametrize("by_exit", [False, True])
@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_an_exception_that_ends_a_process_of_multiprocessing_does_too(how: str, by_exit: bool, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"TRANSPORT = {TRANSPORT!r}\nhow, by_exit = {how!r}, {by_exit}\n{IN_CHILD}")
    assert "closed" in said(str(script))


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


SIGTERM = """
import os, signal, sys, time
from types import SimpleNamespace
from stormtorch.udp import leaving

class Transport:
    closed, inherited, leaving, rank, prefix, store, on_leave = False, False, False, 0, "storm", None, []
    options = SimpleNamespace(leave_s=0.5)
    endpoint = SimpleNamespace(request_leave=lambda: print("asked out", flush=True))

    def close(self, linger_s=None):
        self.closed = True
        print("closed", flush=True)

    def drain(self):
        pass

    def resting(self):
        return True

transport = Transport()
"""


def terminated(script: str) -> tuple[list[str], int]:
    ended = subprocess.run(
        [sys.executable, "-c", SIGTERM + script], capture_output=True, text=True, timeout=60, check=False
    )
    return ended.stdout.splitlines(), ended.returncode


def test_sigterm_asks_out_and_ends_the_process_when_the_grace_is_over() -> None:
    said, status = terminated("leaving.install_sigterm(transport); os.kill(os.getpid(), 15); time.sleep(20)")
    assert (said, status) == (["asked out", "closed"], 143)


def test_sigterm_still_reaches_a_handler_of_the_program() -> None:
    script = """
signal.signal(15, lambda *_: sys.exit(7))
leaving.install_sigterm(transport)
leaving.install_sigterm(transport)
os.kill(os.getpid(), 15)
time.sleep(20)
"""
    assert terminated(script) == (["asked out"], 7)


def test_sigterm_ends_a_process_that_has_left_as_ever() -> None:
    script = "leaving.install_sigterm(transport); transport.close(); os.kill(os.getpid(), 15); time.sleep(20)"
    assert terminated(script) == (["closed"], -15)


def test_sigterm_ends_a_forked_process_at_once() -> None:
    script = """
leaving.install_sigterm(transport)
up, tell = os.pipe()
child = os.fork()
if child == 0:
    os.write(tell, b"x")  # Python forgets signals that come before this
    time.sleep(20)
    os._exit(1)
os.read(up, 1)
os.kill(child, 15)
print(os.waitpid(child, 0)[1], flush=True)
"""
    assert terminated(script) == (["15"], 0)


def test_leave_hands_over_before_it_closes() -> None:
    script = """
leaving.say_goodbye_on_error(transport)
transport.on_leave = [lambda: print("handed over", flush=True)]
leaving.leave()
leaving.leave()
print(transport.leaving)
"""
    assert terminated(script) == (["asked out", "handed over", "closed", "True"], 0)

"""The threads behind futures do not spoil the end of a process."""

import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.pure

BEGIN = """
import os, sys, time
import torch
from stormtorch.staging.threads import run_soon
"""
# C++ calls Python, which is about to go.
IN_A_CALLBACK = """
def late(_):
    time.sleep(0.2)
    raise RuntimeError("nobody asks")
root = torch.futures.Future()
outcome = root.then(late)
run_soon(lambda: root.set_result(1))
time.sleep(0.05)
"""
BLOCKED = "run_soon(lambda: time.sleep(60))"
# What a child inherits of the counts must not keep it waiting, and it must have threads of its own.
FORKED = """
run_soon(lambda: time.sleep(60))
if os.fork() == 0:
    done = []
    run_soon(lambda: done.append(1))
    while not done:
        time.sleep(0.01)
    began = time.monotonic()
    import atexit
    atexit._run_exitfuncs()
    os._exit(0 if time.monotonic() - began < 20.0 else 3)
_, status = os.wait()
sys.stdout.flush()
os._exit(os.waitstatus_to_exitcode(status))
"""
RAISING = """
import threading
threading.excepthook = lambda _: None
for _ in range(3):
    run_soon(lambda: 1 / 0)
time.sleep(0.2)
done = []
run_soon(lambda: done.append(1))
time.sleep(0.2)
sys.exit(0 if done else 3)
"""


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(IN_A_CALLBACK, id="callback", marks=pytest.mark.thorough),
        pytest.param(BLOCKED, id="blocked", marks=pytest.mark.thorough),
        pytest.param(FORKED, id="forked", marks=pytest.mark.thorough),
        pytest.param(RAISING, id="raising"),
    ],
)
def test_a_process_ends_well_and_soon_whatever_its_futures_do(script: str) -> None:
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", BEGIN + script], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 30

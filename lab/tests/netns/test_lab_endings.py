"""Labs end without remains, also when killed; and the command line of labs."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stormtorch_lab.netns import Lab
from stormtorch_lab.netns.fixtures import lab_or_skip

# What is left of a lab is looked for on the whole machine: no other one may run meanwhile.
pytestmark = [pytest.mark.lab, pytest.mark.alone]
STORMTORCH = [sys.executable, "-m", "stormtorch.cli"]
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A registry of this test only, without other labs of the machine."""
    lab_or_skip()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def start(home: Path) -> Iterator[Start]:
    """Starts `stormtorch lab run` and waits until its command runs, which must say "here"."""
    started: list[subprocess.Popen[str]] = []

    def begin(*words: str) -> "subprocess.Popen[str]":
        command = [*STORMTORCH, "lab", "run", *words]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        started.append(process)
        assert process.stdout is not None
        for line in process.stdout:
            if line.endswith("| here\n"):
                return process
        raise AssertionError("the command did not start")

    yield begin
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def run(*words: str, **popen: Any) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*STORMTORCH, "lab", *words], capture_output=True, text=True, timeout=60, **popen)


def marked() -> str:
    """A number of seconds to sleep that no other process sleeps."""
    return f"{1000 + time.monotonic_ns() % 10**9 / 1e6:.6f}"


def sleepers(mark: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if words[:2] == [b"sleep", mark.encode()]:
            found.append(int(path.parent.name))
    return found


def is_gone(mark: str, within_s: float = 5.0) -> bool:
    end = time.monotonic() + within_s
    while sleepers(mark) and time.monotonic() < end:
        time.sleep(0.02)
    return not sleepers(mark)


def awaited(mark: str, count: int) -> set[str]:
    """Waits until so many sleep, and returns their network namespaces."""
    end = time.monotonic() + 10
    while len(sleepers(mark)) < count:
        assert time.monotonic() < end
        time.sleep(0.01)
    return {os.readlink(f"/proc/{pid}/ns/net") for pid in sleepers(mark)}


def vanish(own: set[str], within_s: float = 5.0) -> bool:
    end = time.monotonic() + within_s
    while own & namespaces() and time.monotonic() < end:
        time.sleep(0.02)
    return not own & namespaces()


def namespaces() -> set[str]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            found.add(os.readlink(path))
        except OSError:
            continue
    return found


@pytest.mark.thorough
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signal_ends_everything_and_is_the_status(start: Start, home: Path, number: int, status: int) -> None:
    mark = marked()
    process = start("--hosts", "2", "--", "sh", "-c", f"echo here; (setsid sleep {mark} &) ; sleep {mark}")
    own = awaited(mark, 4)
    assert len(own) == 2
    process.send_signal(number)
    assert process.wait(20) == status
    assert is_gone(mark)
    assert vanish(own)
    assert not list((home / f"stormtorch-labs-{os.getuid()}").iterdir())


@pytest.mark.thorough
def test_ranks_hear_ctrl_c_and_may_tidy_up(start: Start) -> None:
    script = "import time\nprint('here', flush=True)\ntry: time.sleep(60)\nexcept KeyboardInterrupt: print('tidy')"
    process = start("--hosts", "2", "--", sys.executable, "-c", script)
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert process.stdout.read().count("tidy") == 2


def test_owner_that_is_killed_takes_everything_with_it(start: Start) -> None:
    mark = marked()
    process = start("--hosts", "2", "--", "sh", "-c", f"echo here; (setsid sleep {mark} &) ; sleep {mark}")
    own = awaited(mark, 4)
    process.kill()
    process.wait()
    assert is_gone(mark)
    assert vanish(own)
    cleaned = run("clean")
    assert "removed entry of lab" in cleaned.stdout
    assert run("clean").stdout == "nothing to remove\n"


@pytest.mark.thorough
def test_clean_leaves_running_labs_alone(start: Start) -> None:
    mark = marked()
    process = start("--hosts", "2", "--", "sh", "-c", f"echo here; sleep {mark}")
    assert "still running" in run("clean").stdout
    assert process.poll() is None
    assert sleepers(mark)


def test_host_that_is_killed_ends_alone(home: Path) -> None:
    with Lab(3, probe=False) as network:
        others = [network.start(host, ["sleep", "60"]) for host in range(3)]
        os.kill(network.holders[1].pid, signal.SIGKILL)
        assert others[1].wait(10) != 0
        assert others[0].poll() is None and others[2].poll() is None
        # The remaining hosts can still be changed and measured.
        network.set(loss=0.5)
        assert network.measured().links
    for process in others:
        process.wait(10)


def test_error_inside_the_with_statement_leaves_nothing(home: Path) -> None:
    mark = marked()
    with pytest.raises(ZeroDivisionError), Lab(2, probe=False) as network:
        process = network.start(0, ["sleep", mark])
        own = awaited(mark, 1)
        raise ZeroDivisionError
    process.wait(10)
    assert is_gone(mark)
    assert vanish(own)


@pytest.mark.thorough
def test_running_lab_is_shown_and_changed_from_outside(start: Start) -> None:
    process = start("--hosts", "3", "--rate", "50mbit", "--", "sh", "-c", "echo here; sleep 60")
    shown = run("show").stdout
    assert "50 Mbit/s, no loss" in shown
    name = shown.removeprefix("lab ").partition(":")[0]
    assert name.partition("-")[0].isdecimal()
    changed = run("set", "--loss", "0.25", "--burst", "4", "--rate", "25mbit", "--cut", "2")
    assert changed.returncode == 0
    assert f"lab {name}: now 25 Mbit/s, 25 % loss in bursts of 4" in changed.stderr
    assert f"lab {name}: now" in run("set", "--lab", name, "--loss", "0.25").stderr
    assert "cut off: h2" in run("show").stdout
    assert "cut off" not in run("set", "--join", "2").stderr
    assert "no rate limit" in run("set", "--rate", "unlimited").stderr
    assert "links cut: 0>1, 1>0, 2>0, MTU 1200" in run("set", "--cut", "0-1", "--cut", "2:0", "--mtu", "1200").stderr
    assert "links cut: 2>0, MTU" in run("set", "--join", "0-1").stderr
    assert run("set", "--cut", "0>1").returncode == 2
    refused = run("set", "--cut", "7")
    assert refused.returncode != 0 and "host 7" in refused.stderr
    assert process.poll() is None


@pytest.mark.thorough
def test_worst_status_and_measured_conditions_are_kept(home: Path) -> None:
    path = home / "out.json"
    words = ["run", "--hosts", "2", "--rate", "100mbit", "--loss", "0.1", "--json", str(path)]
    done = run(*words, "--", "sh", "-c", "echo out; exit $((3 * RANK))")
    assert done.returncode == 3
    assert sorted(done.stdout.splitlines()) == ["h0 | out", "h1 | out"]
    assert re.search(r"asked +100 Mbit/s, 10 % loss", done.stderr)
    assert "rank 1: 3" in done.stderr
    data = json.loads(path.read_text())
    assert data["requested"]["loss"] == 0.1
    # Whether the links are filled depends on the machine, see test_lab.py.
    rates = data["measured"]["rates_bits_per_s"]
    assert len(rates) == 2 and 0 < min(rates) <= max(rates) < 115e6
    assert data["statuses"] == [0, 3]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("--rate", "swift"), "--rate"),
        (("--loss", "1.5"), "--loss"),
        (("--hosts", "1"), "--hosts"),
        (("--per-node", "0"), "--per-node"),
        (("--trace", "/none.jsonl:3"), "--trace"),
        (("--per-link", "/none.json"), "--per-link"),
        (("--jitter", "1ms"), "--jitter"),
        (("--timeout-s", "0"), "--timeout-s"),
        (("--json", "/none/out.json"), "--json"),
    ],
)
def test_bad_option_is_refused_by_name(words: tuple[str, ...], option: str) -> None:
    done = run("run", *words, "--", "true")
    assert done.returncode == 2
    assert option in done.stderr


@pytest.mark.skipif(shutil.which("setpriv") is None or os.getuid() != 0, reason="needs setpriv and root to give it up")
def test_without_any_privilege_the_error_says_what_to_do(home: Path) -> None:
    drop = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--"]
    done = subprocess.run([*drop, *STORMTORCH, "lab", "run", "--", "true"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    for words in ("needs root", "user namespaces", "stormtorch.faults("):
        assert words in " ".join(done.stderr.split())

"""Virtual workers split over the processes of torchrun: the same results as in one process, printed once."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from commands import ENVIRONMENT, STORMTORCH

pytestmark = pytest.mark.pure

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
SMALL = ("--batch", "1", "--width", "16", "--layers", "1", "--context", "8", "--device", "cpu")
ONE_THREAD = ENVIRONMENT | {"OMP_NUM_THREADS": "1"}


def run(*arguments: str, processes: bool = True) -> "subprocess.CompletedProcess[str]":
    launcher = (*TORCHRUN, "stormtorch.cli") if processes else STORMTORCH
    return subprocess.run(
        [*launcher, "simulate", *SMALL, *arguments],
        env=ONE_THREAD,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def results(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["results"]
    return found


def numbers(curve: list[list[float]], column: int) -> list[float]:
    return [row[column] for row in curve]


@pytest.mark.thorough
def test_two_processes_find_what_one_finds_and_tell_it_once(tmp_path: Path) -> None:
    # An odd number of workers, so that one process has more; lags, repair and fetching included.
    policies = ("--policy", "lossless,lead,model-averaging,gradient-averaging")
    asked = ("--workers", "7", "--steps", "6", "--loss", "0.3", "--burst", "4", "--max-lag", "2", *policies)
    together, alone = tmp_path / "two.json", tmp_path / "one.json"
    lines = tmp_path / "steps.jsonl"
    done = run(*asked, "--json", str(together), "--ledger", str(lines), "--checkpoint", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert " ".join(done.stdout.split()).count("7 virtual workers") == 1
    assert len(lines.read_text().splitlines()) == 4 * 6
    assert run(*asked, "--json", str(alone), processes=False).returncode == 0
    for own, other in zip(results(together), results(alone), strict=True):
        for name in ("policy", "lag", "arrived", "fetched", "lead", "broadcast_lost"):
            assert own[name] == other[name]
        assert own["val_loss"] == pytest.approx(other["val_loss"], rel=1e-5)
        assert own["drift"] == pytest.approx(other["drift"], rel=1e-3)
        assert numbers(own["curve"], 1) == pytest.approx(numbers(other["curve"], 1), rel=1e-4)
        assert numbers(own["drift_curve"], 1) == pytest.approx(numbers(other["drift_curve"], 1), rel=1e-3)
    assert sum(each["fetched"] for each in results(alone)) > 0


@pytest.mark.slow
def test_more_processes_than_workers_are_refused_once() -> None:
    done = subprocess.run(
        [*TORCHRUN[:-2], "3", "-m", "stormtorch.cli", "simulate", *SMALL, "--workers", "2"],
        env=ONE_THREAD,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode != 0
    assert done.stderr.count("must be at least the 3 processes, got 2") == 1


@pytest.mark.slow
def test_ctrl_c_saves_the_same_step_of_all_processes(tmp_path: Path) -> None:
    steps = 800
    asked = ("--workers", "4", "--policy", "lead", "--burst", "4", "--checkpoint", str(tmp_path / "run"))
    # In a terminal, the bar shows how far the steps are.
    screen, terminal = pty.openpty()
    process = subprocess.Popen(
        [*TORCHRUN, "stormtorch.cli", "simulate", *SMALL, "--steps", str(steps), *asked],
        env=ONE_THREAD | {"COLUMNS": "200", "TERM": "xterm"},
        stdout=subprocess.DEVNULL,
        stderr=terminal,
        start_new_session=True,
    )
    os.close(terminal)
    shown, interrupted = "", False
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        if not select.select([screen], [], [], 1.0)[0]:
            continue
        try:
            shown += os.read(screen, 65536).decode(errors="replace")
        except OSError:  # nobody has the terminal any more
            break
        if not interrupted and re.search(rf"[1-9]\d*/{steps}", shown):
            os.killpg(process.pid, signal.SIGINT)
            interrupted = True
    os.close(screen)
    assert interrupted, shown
    assert process.wait(timeout=10) != 0
    assert shown.count("interrupted: the same command resumes from the checkpoint") == 1, shown
    kept = sorted(each.name for each in (tmp_path / "run").iterdir())
    assert kept == ["lead-0.pt.0", "lead-0.pt.1", "settings.json"]
    out = tmp_path / "resumed.json"
    done = run("--steps", str(steps), *asked, "--json", str(out))
    assert done.returncode == 0, done.stderr
    (result,) = results(out)
    assert numbers(result["curve"], 0) == list(range(1, steps + 1))
    assert sorted(each.name for each in (tmp_path / "run").iterdir()) == ["lead-0.json", "settings.json"]

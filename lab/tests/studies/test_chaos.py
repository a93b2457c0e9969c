"""A short chaos run in a lab, as the command runs it: every training must survive its faults."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from commands import ENVIRONMENT, STORMTORCH
from stormtorch_lab.netns.fixtures import lab_or_skip

pytestmark = [pytest.mark.lab, pytest.mark.slow]


@pytest.fixture(autouse=True)
def _own_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab_or_skip()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def workers(folder: Path) -> list[int]:
    """Processes that write their logs into a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
        except OSError:
            continue
        if b"stormtorch_lab.studies.chaos.worker" in words and str(folder).encode() in words:
            found.append(int(path.parent.name))
    return found


@pytest.mark.timeout(600)
def test_three_minutes_of_all_faults_at_ten_per_cent_loss_break_nothing(tmp_path: Path) -> None:
    report, logs = tmp_path / "chaos.json", tmp_path / "logs"
    words = ["--hosts", "5", "--minutes", "3", "--seed", "2", "--loss", "0.1", "--no-baseline", "--patience-s", "90"]
    done = subprocess.run(
        [*STORMTORCH, "chaos", *words, "--json", report, "--keep", logs],
        capture_output=True,
        text=True,
        timeout=580,
        env={**ENVIRONMENT, "XDG_RUNTIME_DIR": str(tmp_path)},
    )
    data = json.loads(report.read_text())
    # The speed of process starts depends on the machine; all other invariants must hold on any.
    slow = ("every affected host comes back", "no process exits by itself")
    broken = [check for check in data["checks"] if not check["holds"] and check["name"] not in slow]
    assert not broken, done.stdout + done.stderr
    assert len({fault["kind"] for fault in data["timeline"]}) == 10
    assert not workers(logs)


@pytest.mark.timeout(300)
def test_training_passes_storms_and_narrow_paths_and_leaves_a_report(tmp_path: Path) -> None:
    report, picture, logs = tmp_path / "chaos.json", tmp_path / "chaos.png", tmp_path / "logs"
    words = ["--hosts", "3", "--minutes", "0.4", "--seed", "1", "--loss", "0.1", "--faults", "storm,mtu"]
    done = subprocess.run(
        [*STORMTORCH, "chaos", *words, "--json", report, "--plot", picture, "--keep", logs],
        capture_output=True,
        text=True,
        timeout=280,
        env={**ENVIRONMENT, "XDG_RUNTIME_DIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout.splitlines()[-1]
    data = json.loads(report.read_text())
    assert data["passed"] and all(check["holds"] for check in data["checks"])
    assert {fault["kind"] for fault in data["timeline"]} == {"storm", "mtu"}
    assert data["compared"] > 2
    assert data["undisturbed_val_loss"] == pytest.approx(data["val_loss"], rel=0.02)
    assert data["conditions"]["requested"]["loss"] == 0.1
    assert 0.1 < data["conditions"]["measured"]["loss"] < 0.5
    assert picture.stat().st_size > 10_000
    assert not workers(logs)


@pytest.mark.timeout(120)
def test_an_interrupt_ends_all_hosts_and_is_the_status(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    process = subprocess.Popen(
        [*STORMTORCH, "chaos", "--hosts", "3", "--minutes", "1", "--keep", logs],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**ENVIRONMENT, "XDG_RUNTIME_DIR": str(tmp_path)},
    )
    try:
        deadline = time.monotonic() + 60
        while len(workers(logs)) < 3:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, output
    assert "interrupted" in output
    assert not workers(logs)
    assert not list((tmp_path / f"stormtorch-labs-{os.getuid()}").iterdir())

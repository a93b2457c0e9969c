"""Launchers of ranks that come and go: each starts a rank that was killed again, and it comes into the running job."""

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from example_runs import EXAMPLES

LAUNCH = EXAMPLES / "launch"
HELPERS = Path(__file__).parent / "helpers"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONUNBUFFERED": "1"}


class Processes:
    """Launchers under way, each with a file for what it says; whatever is left of them is killed at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, command: list[str], **environment: str) -> None:
        with open(self._folder / name, "wb") as out:
            self._running[name] = subprocess.Popen(
                command, stdout=out, stderr=out, env=ENVIRONMENT | environment, start_new_session=True
            )

    def said(self, name: str) -> str:
        return (self._folder / name).read_text()

    def wait_for(self, name: str, pattern: str, within_s: float = 60.0) -> str:
        """Waits until a launcher has said something; returns what the pattern finds."""
        give_up_at = time.monotonic() + within_s
        while not (found := re.search(pattern, self.said(name))):
            assert time.monotonic() < give_up_at, f"{name} said only: {self.said(name)}"
            time.sleep(0.1)
        return found[found.lastindex or 0]

    def end(self, name: str, within_s: float = 60.0) -> int:
        return self._running.pop(name).wait(within_s)

    def close(self) -> None:
        for process in self._running.values():
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    processes = Processes(tmp_path)
    yield processes
    processes.close()


@pytest.fixture
def store(processes: Processes) -> str:
    processes.start("store", [sys.executable, str(LAUNCH / "store.py"), "--host", "127.0.0.1", "--port", "0"])
    return "tcp://" + processes.wait_for("store", r"store at (\S+)")


def worker(rank: int) -> int:
    """The process that works as a rank now, whoever started it."""
    for status in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = status.read_bytes().split(b"\0")
        except OSError:
            continue  # gone meanwhile
        is_python = b"python" in words[0] and b"torch.distributed.run" not in words and b"torchrun" not in words[1]
        mine = any(word.endswith(b"/launched_rank.py") for word in words[1:3])
        if is_python and mine and words[words.index(b"--rank") + 1] == str(rank).encode():
            return int(status.parent.name)
    raise AssertionError(f"nobody works as rank {rank}")


def launched(way: str, store: str, rank: int, world: int) -> tuple[list[str], dict[str, str]]:
    script, settings = str(HELPERS / "launched_rank.py"), ["--steps", "300", "--pause", "0.05", "--silence", "2"]
    if way == "torchrun":
        environment = {"STORE": store, "RANK": str(rank), "WORLD": str(world)}
        torchrun = str(Path(sys.executable).parent / "torchrun")
        return [str(LAUNCH / "torchrun.sh"), script, *settings], environment | {"TORCHRUN": torchrun}
    rest = ["--store", store, "--rank", str(rank), "--world", str(world), *settings]
    return [str(LAUNCH / "loop.sh"), sys.executable, script, *rest], {}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["loop", "torchrun"])
def test_a_rank_that_is_killed_is_started_again_and_the_others_are_left_alone(
    way: str, processes: Processes, store: str
) -> None:
    for rank in range(2):
        command, environment = launched(way, store, rank, 2)
        processes.start(str(rank), command, **environment)
    for rank in range(2):
        processes.wait_for(str(rank), f"rank {rank}: begins at step 0")
    other = worker(0)
    os.kill(worker(1), signal.SIGKILL)
    assert int(processes.wait_for("1", r"begins at step 0[\s\S]*begins at step (\d+)")) > 0
    assert worker(0) == other
    for rank in range(2):
        assert processes.end(str(rank)) == 0, processes.said(str(rank))
        assert f"rank {rank}: 300 steps" in processes.said(str(rank))
    assert processes.said("0").count("begins") == 1


def test_the_loop_passes_sigterm_on_and_ends(processes: Processes) -> None:
    asleep = (
        "import signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(3))\nprint('up', flush=True)\ntime.sleep(60)"
    )
    processes.start("loop", [str(LAUNCH / "loop.sh"), sys.executable, "-c", asleep])
    processes.wait_for("loop", "up")
    os.kill(processes._running["loop"].pid, signal.SIGTERM)
    assert processes.end("loop", 10.0) == 3
    assert processes.said("loop").count("up") == 1


def test_the_loop_ends_with_success(processes: Processes, tmp_path: Path) -> None:
    twice = (
        f"import os, sys\np = {str(tmp_path / 'seen')!r}\nif os.path.exists(p): sys.exit(0)\nopen(p, 'w')\nsys.exit(7)"
    )
    processes.start("loop", [str(LAUNCH / "loop.sh"), sys.executable, "-c", twice], RESTART_S="0.1")
    assert processes.end("loop", 10.0) == 0
    assert "exit status 7" in processes.said("loop")


@pytest.mark.slow
def test_the_batch_script_of_slurm_starts_all_tasks(processes: Processes, tmp_path: Path) -> None:
    """Slurm is not there: its `srun` is played by a loop over the tasks."""
    tools = tmp_path / "tools"
    tools.mkdir()
    srun = tools / "srun"
    srun.write_text(
        '#!/bin/bash\nwhile [[ "$1" == --* ]]; do echo "srun $1"; shift; done\n'
        'for ((i = 0; i < SLURM_NTASKS; i++)); do SLURM_PROCID=$i "$@" & tasks+=($!); done\nwait "${tasks[@]}"\n'
    )
    hostname = tools / "hostname"
    hostname.write_text("#!/bin/sh\necho 127.0.0.1\n")
    for tool in (srun, hostname):
        tool.chmod(0o755)
    script = (LAUNCH / "slurm.sbatch").read_text().replace("examples/", f"{EXAMPLES}/")
    batch = tmp_path / "slurm.sbatch"
    batch.write_text(script)
    path = f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    job = str(os.getpid())
    processes.start("batch", ["bash", str(batch)], PATH=path, SLURM_JOB_ID=job, SLURM_NTASKS="2")
    for rank in range(2):
        assert float(processes.wait_for("batch", rf"rank {rank}: 300 steps, accuracy ([0-9.]+)%", 90.0)) > 80
    for option in ("--no-kill", "--kill-on-bad-exit=0", "--wait=0"):
        assert f"srun {option}" in processes.said("batch")


@pytest.mark.parametrize("script", ["loop.sh", "torchrun.sh", "slurm.sbatch"])
def test_scripts_are_well_formed(script: str) -> None:
    shell = (LAUNCH / script).read_text().splitlines()[0].removeprefix("#!")
    assert subprocess.run([shell, "-n", str(LAUNCH / script)], check=False, timeout=20).returncode == 0


def test_the_unit_of_systemd_is_well_formed() -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    verified = subprocess.run(
        ["systemd-analyze", "verify", str(LAUNCH / "storm@.service")],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (verified.returncode, verified.stderr) == (0, "")


def test_the_objects_of_kubernetes_are_well_formed(tmp_path: Path) -> None:
    """Without a cluster, only the form can be checked: `kubectl kustomize` reads and writes it."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    shutil.copy(LAUNCH / "kubernetes.yaml", tmp_path)
    (tmp_path / "kustomization.yaml").write_text("resources: [kubernetes.yaml]\n")
    built = subprocess.run(
        ["kubectl", "kustomize", str(tmp_path)], capture_output=True, text=True, check=False, timeout=60
    )
    assert built.returncode == 0, built.stderr
    assert sorted(re.findall(r"^kind: (\w+)$", built.stdout, re.M)) == [
        "Deployment", "Service", "Service", "StatefulSet", "StatefulSet",
    ]  # fmt: skip
    assert built.stdout.count("podManagementPolicy: Parallel") == 2
    ranks, world = re.findall(r"^  replicas: (\d+)$", built.stdout, re.M), re.findall(r'value: "(\d+)"', built.stdout)
    assert set(world) <= set(ranks)


@pytest.mark.slow
def test_actors_of_ray_train_together(processes: Processes, tmp_path: Path) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed: pip install -e '.[frameworks]'")
    command: list[Any] = [sys.executable, str(LAUNCH / "ray_actors.py"), "--steps", "60"]
    processes.start("ray", command, HOME=str(tmp_path))
    assert processes.end("ray", 110.0) == 0, processes.said("ray")
    assert len(re.findall(r"rank \d: 60 steps", processes.said("ray"))) == 2

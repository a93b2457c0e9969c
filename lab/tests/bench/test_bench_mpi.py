"""MPI beside the other backends, in processes started by mpirun; without MPI, an error names the packages."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from commands import call
from stormtorch.checks import BadSetting
from stormtorch_lab.bench.allreduce import AllReduceSettings, run_allreduce
from stormtorch_lab.bench.latency import LatencySettings
from stormtorch_lab.jobs.failed import RankFailed
from stormtorch_lab.jobs.mpi import check_mpi, run_ranks_by_mpi
from stormtorch_lab.jobs.ranks import Member
from stormtorch_lab.netns import Conditions


def mpi_or_skip() -> None:
    try:
        check_mpi()
    except BadSetting as error:
        pytest.skip(f"backends {error.problem}")


def mpi_ranks() -> list[str]:
    """Command lines of ranks that mpirun has started, and of mpirun itself."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if "stormtorch_lab.jobs.mpi" in command:
                found.append(command)
    return found


def name_itself(member: Member, greeting: str) -> str:
    member.report(member.rank)
    return f"{greeting} {member.rank} of {member.world}"


def fail_on_one(member: Member) -> None:
    if member.rank == 1:
        raise ValueError("the cat sat on the switch")
    member.store.get("never set")


def die_on_one(member: Member) -> None:
    if member.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    member.store.get("never set")


# --- without MPI ------------------------------------------------------------------------------------------------------


def test_without_mpirun_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for settings in (AllReduceSettings, LatencySettings):
        with pytest.raises(BadSetting, match=r"apt-get install openmpi-bin libopenmpi-dev, then pip install mpi4py"):
            settings(backends=("storm", "mpi"))
    code, text = call("bench", "allreduce", "--backends", "storm,mpi")
    assert (code, "apt-get install openmpi-bin" in text) == (2, True)


def test_another_mpi_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = tmp_path / "mpirun"
    other.write_text("#!/bin/sh\necho HYDRA build details\n")
    other.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BadSetting, match="only where Open MPI and mpi4py are"):
        check_mpi()


def test_mpi_is_for_one_host() -> None:
    with pytest.raises(BadSetting, match=r"^backends has mpi only on one host"):
        AllReduceSettings(backends=("storm", "mpi"), network=Conditions(rate="100mbit"))


# --- with it ----------------------------------------------------------------------------------------------------------


def test_mpi_takes_turns_with_the_others() -> None:
    mpi_or_skip()
    settings = AllReduceSettings(
        ranks=2, mb=(0.5,), iters=2, warmup=1, backends=("storm", "gloo", "mpi"), timeout_s=100
    )
    report = run_allreduce(settings)
    assert [call.backend for call in report.calls] == [
        "storm",
        "gloo",
        "mpi",
        "copies",
        "gloo",
        "mpi",
        "copies",
        "storm",
    ]
    assert "Open MPI" in report.conditions["started_by"]
    mpi = report.results[-1]
    assert (mpi.backend, mpi.arrived, mpi.tcp) == ("mpi", 1.0, None)
    assert mpi.cpu_s_per_gb > 0
    assert mpi_ranks() == []
    with pytest.raises(BadSetting, match=r"^dtype must be float32 beside mpi"):
        AllReduceSettings(backends=("storm", "mpi"), dtype="bfloat16")


def test_a_rank_under_mpirun_that_fails_or_dies_is_named_and_takes_the_others_with_it() -> None:
    mpi_or_skip()
    heard: list[object] = []
    results = run_ranks_by_mpi(
        name_itself, 2, ("rank",), timeout_s=60, on_message=lambda _rank, what: heard.append(what)
    )
    assert (results, sorted(heard, key=str)) == (["rank 0 of 2", "rank 1 of 2"], [0, 1])
    with pytest.raises(RankFailed, match=r"^rank 1: ValueError: the cat sat on the switch$"):
        run_ranks_by_mpi(fail_on_one, 2, timeout_s=60)
    with pytest.raises(RankFailed, match=r"^rank [01]: ended without a result$") as caught:
        run_ranks_by_mpi(die_on_one, 2, timeout_s=60)
    assert "signal 9" in caught.value.details  # mpirun's output
    assert mpi_ranks() == []


def test_ranks_under_mpirun_end_with_a_benchmark_that_is_killed() -> None:
    mpi_or_skip()
    words = [sys.executable, "-m", "stormtorch.cli", "bench", "allreduce", "--backends", "mpi", "--iters", "100000"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while len(mpi_ranks()) < 3:  # mpirun names the module, too
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(2)
    process.kill()
    process.wait()
    while mpi_ranks():
        assert time.monotonic() < deadline
        time.sleep(0.1)

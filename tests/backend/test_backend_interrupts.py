"""Ctrl-C and abort end a rank that waits, and a process can make a new group after an error. In real processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from backend_job import HERE, Job, free_ports

SCRIPT, TORCHRUN = "backend_interrupted.py", "backend_torchrun.py"
# Left alone, calls block for a minute.
PROMPT_S = 5.0


@pytest.mark.thorough
@pytest.mark.parametrize("call", ["all_reduce", "async", "barrier", "monitored_barrier", "recv", "anybody", "send"])
def test_ctrl_c_ends_a_blocked_call_at_once_and_the_process_in_good_order(call: str) -> None:
    # As the terminal does it for all processes of a job, and torchrun for its workers.
    with Job(SCRIPT, f"interrupted:{call}", 2, free_ports(3)) as job:
        for rank in range(2):
            job.await_message(rank, "blocked")
        time.sleep(0.5)
        at = job.interrupt(1, 0)  # rank 0 sleeps, and cannot receive the goodbye of rank 1 instead
        said = job.end(within_s=30.0)
        job.check_nothing_is_left()
    for met in said:
        assert met["exit"] == 0, met
        assert met["raised"] - at < PROMPT_S, met
        assert met["destroyed"] - at < 2 * PROMPT_S, met
        assert "Traceback" not in met["stderr"], met


@pytest.mark.thorough
def test_the_others_are_told_when_one_rank_is_interrupted() -> None:
    with Job(SCRIPT, "left", 3, free_ports(4)) as job:
        for rank in range(3):
            job.await_message(rank, "blocked")
        time.sleep(0.5)
        at = job.interrupt(1)
        said = job.end(within_s=30.0)
        job.check_nothing_is_left()
    for rank in (0, 2):
        assert said[rank]["culprit"] == 1, said
        assert "rank 1 closed its transport" in said[rank]["text"]
        assert said[rank]["raised"] - at < 2 * PROMPT_S, said
    assert [met["exit"] for met in said] == [0, 0, 0]


@pytest.mark.thorough
def test_ctrl_c_on_torchrun_ends_all_ranks_and_leaves_nothing(tmp_path: Path) -> None:
    out, where = tmp_path / "out", [f"--master-port={free_ports(1)[0]}"]
    with out.open("wb") as stream:
        torchrun = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *where, str(HERE / TORCHRUN)],
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
    try:
        give_up_at = time.monotonic() + 60
        while out.read_text().count("blocked") < 2 and time.monotonic() < give_up_at:
            time.sleep(0.05)
        time.sleep(0.5)
        os.killpg(torchrun.pid, signal.SIGINT)
        torchrun.wait(40)
    finally:
        if torchrun.poll() is None:
            os.killpg(torchrun.pid, signal.SIGKILL)
            torchrun.wait()
    said = out.read_text()
    assert said.count("interrupted") == 2, said
    assert said.count("destroyed") == 2, said
    with pytest.raises(ProcessLookupError):
        os.killpg(torchrun.pid, 0)


@pytest.mark.thorough
@pytest.mark.parametrize("call", ["all_reduce", "barrier", "recv", "anybody", "monitored_barrier", "future"])
def test_abort_from_another_thread_ends_a_blocked_call_and_all_can_begin_anew(call: str) -> None:
    with Job(SCRIPT, f"aborted:{call}", 2, free_ports(3)) as job:
        said = job.end(within_s=40.0)
        job.check_nothing_is_left()
    assert [met["exit"] for met in said] == [0, 0], said
    assert said[1]["kind"] == ("RuntimeError" if call == "future" else "Closed"), said[1]
    assert "rank 1: " in said[1]["text"]
    assert "the engine is closed" in said[1]["text"]
    assert said[1]["raised"] - said[1]["aborted"] < PROMPT_S, said[1]
    assert [(met["second"], met["third"]) for met in said] == [(2000.0, 2000.0)] * 2


@pytest.mark.thorough
def test_abort_does_not_wait_for_the_dead() -> None:
    with Job(SCRIPT, "abandoned:all_reduce", 2, free_ports(3)) as job:
        met = job.end(within_s=40.0)[1]
        job.check_nothing_is_left()
    assert met["exit"] == 0, met
    assert met["kind"] == "Closed", met
    assert met["took"] < PROMPT_S, met


@pytest.mark.thorough
def test_a_process_can_begin_anew_after_an_error() -> None:
    with Job(SCRIPT, "failed", 2, free_ports(3)) as job:
        said = job.end(within_s=40.0)
        job.check_nothing_is_left()
    for met in said:
        assert met["exit"] == 0, said
        assert met["kind"] in ("ExchangeTimeout", "PeerFailed", "PeerLeft"), said
        assert (met["second"], met["third"]) == (2000.0, 2000.0), said


def test_survivors_can_meet_again_without_the_dead() -> None:
    with Job(SCRIPT, "bereaved", 3, free_ports(4)) as job:
        said = job.end(within_s=40.0)
        job.check_nothing_is_left()
    assert said[1]["exit"] == -signal.SIGKILL
    for met in (said[0], said[2]):
        assert met["exit"] == 0, met
        assert met["culprit"] == 1
        assert (met["second"], met["third"]) == (2000.0, 2000.0)

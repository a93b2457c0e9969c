"""Ranks as real processes on faulty machines, with full disks, clock jumps or no memory: training goes on."""

import json
import os
import resource
import signal
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import clock
from full_disk import fill, may_mount, mount_small
from machine_job import MachineJob
from machine_rank import How, Rank
from stormtorch import BoundedDrift
from stormtorch.policies.policy import Deadline

mounts = pytest.mark.skipif(not may_mount(), reason="mounting a file system needs root")


# --- a full disk ------------------------------------------------------------------------------------------------------

FULL, FREE, DISK_STEPS = 8, 20, 30


def on_a_small_disk(rank: Rank) -> None:
    folder = Path(tempfile.mkdtemp())
    rank.kept.append(folder)
    mount_small(folder, 1 << 20)
    os.environ.update(STORM_RECORD=str(folder / "records"), STORM_RECORD_EVERY_S="0.05")


def follow(rank: Rank) -> None:
    rank.session.ledger.follow(rank.kept[0] / "ledger.jsonl")


def save_and_fill(rank: Rank, step: int) -> None:
    folder: Path = rank.kept[0]
    beside, checkpoint = folder / "checkpoint.new", folder / "checkpoint.pt"
    if step % 4 == 0:
        try:
            torch.save({"model": rank.model.state_dict(), "step": step}, beside)
            os.replace(beside, checkpoint)
        except (RuntimeError, OSError):
            rank.report(unsaved=step)
            beside.unlink(missing_ok=True)
    if step == FULL:
        fill(folder)
    if step == FREE:
        (folder / "filler").unlink()
    if step == DISK_STEPS - 1:
        rank.transport.reporter.end("done")  # writes what is left
        rank.report(saved=torch.load(checkpoint)["step"])
        rank.report(rows=[json.loads(line)["step"] for line in (folder / "ledger.jsonl").read_text().splitlines()])
        (records,) = (folder / "records").iterdir()
        rank.report(records=[json.loads(line)["n"] for line in records.read_text().splitlines()])


@pytest.mark.thorough
@mounts
def test_a_disk_that_is_full_for_a_while_costs_rows_and_checkpoints_but_no_step(tmp_path: Path) -> None:
    how = How(steps=DISK_STEPS)
    full = How(steps=DISK_STEPS, begin=on_a_small_disk, prepared=follow, after=save_and_fill)
    with MachineJob(tmp_path, how, {2: full}) as job:
        assert [each.end() for each in job.ranks] == [0, 0, 0]
        victim = job.ranks[2]
        assert victim.reported("step") == list(range(1, DISK_STEPS + 1))
        assert victim.reported("members") == [[0, 1, 2]]
        assert set(victim.reported("unsaved")) >= {12, 16} and victim.reported("saved") == [28]
        (rows,) = victim.reported("rows")
        assert (
            rows[0] == 0 and rows[-1] >= DISK_STEPS - 2 and set(range(FULL + 8, FREE)).isdisjoint(rows)
        )  # a page has room for some
        # Records wait until there is space again, and none is lost.
        (records,) = victim.reported("records")
        assert records == list(range(len(records)))
        log = "\n".join(victim.reported("log"))
        for words in ("cannot write to", "it lacks", "cannot write records to", "records can be written to"):
            assert words in log


# --- a clock that jumps -----------------------------------------------------------------------------------------------

CLOCK_STEPS = 30
AHEAD_S = {8: 3600.0, 14: -7200.0, 20: 0.05, 21: -0.05, 22: 0.05, 23: 0.0, 26: 30 * 86400.0}


def jump(_rank: Rank, step: int) -> None:
    if step in AHEAD_S:
        clock.jump(AHEAD_S[step])


def keep_records(rank: Rank) -> None:
    rank.session.record(os.environ["RECORDS"], every_s=0.05)


@pytest.mark.thorough
def test_nothing_that_decides_looks_at_the_wall_clock(tmp_path: Path) -> None:
    """The clock of one rank jumps by hours, days and milliseconds, in both directions."""
    library = clock.build(tmp_path)
    if library is None:
        pytest.skip("there is no C compiler for what is preloaded")
    jumping = How(
        steps=CLOCK_STEPS,
        silence_s=10.0,
        before=jump,
        prepared=keep_records,
        environment=clock.environment(library) | {"RECORDS": str(tmp_path / "records")},
    )
    with MachineJob(tmp_path, replace(jumping, before=None, prepared=None, environment={}), {1: jumping}) as job:
        assert [each.end() for each in job.ranks] == [0, 0, 0]
        for each in job.ranks:
            assert each.reported("members") == [[0, 1, 2]] and each.reported("events") == [[]]
            assert each.reported("values") == job.ranks[0].reported("values")
            assert each.longest_pause_s() < jumping.silence_s
    # It was the clock that Python sees, too.
    (records,) = (tmp_path / "records").iterdir()
    times = [json.loads(line)["time"] for line in records.read_text().splitlines() if '"time"' in line]
    assert max(times) - min(times) > 29 * 86400.0


# --- no memory --------------------------------------------------------------------------------------------------------

MEMORY_STEPS, OUT_AT = 30, 8
CGROUP = Path("/sys/fs/cgroup/memory") / f"stormtorch-test-{os.getpid()}"


def has_memory_cgroup() -> bool:
    """Whether this process may limit the memory of others by a control group of the first kind."""
    try:
        CGROUP.mkdir()
        CGROUP.rmdir()
    except OSError:
        return False
    return True


def enter_cgroup(rank: Rank) -> None:
    (Path(os.environ["CGROUP"]) / "cgroup.procs").write_text(str(os.getpid()))


def outgrow_cgroup(rank: Rank, step: int) -> None:
    folder = Path(os.environ["CGROUP"])
    if step == OUT_AT:
        used = int((folder / "memory.usage_in_bytes").read_text())
        (folder / "memory.limit_in_bytes").write_text(str(used + (32 << 20)))
        while True:  # until the kernel kills this process
            rank.kept.append(bytearray(b"x" * (4 << 20)))


def take_all_there_is(rank: Rank, step: int) -> None:
    """Takes all memory that this process can get, as under `ulimit -v`, and frees none of it."""
    if step == OUT_AT:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (16 << 20),) * 2)
        size, rank.kept = 8 << 20, [None] * 100_000
        for place in range(len(rank.kept)):
            while rank.kept[place] is None and size >= 1024:
                try:
                    rank.kept[place] = bytearray(size)
                except MemoryError:
                    size //= 2
        torch.empty(64 << 20)


def go_on_without_rank_2(job: MachineJob, before_s: float) -> None:
    for each in job.ranks[:2]:
        assert each.end() == 0
        assert each.reported("members") == [[0, 1]]
        assert each.reported("values") == job.ranks[0].reported("values")
        assert any("rank 2 is gone" in event for event in each.reported("events")[0])
        assert each.longest_pause_s() < before_s


def test_a_rank_without_memory_says_so_at_its_end_and_the_others_go_on_at_once(tmp_path: Path) -> None:
    """The rank sends a goodbye although no memory is left. Otherwise, the others would wait for a minute."""
    how = How(steps=MEMORY_STEPS, silence_s=60.0)
    with MachineJob(tmp_path, how, {2: replace(how, within=take_all_there_is)}) as job:
        go_on_without_rank_2(job, before_s=20.0)
        assert job.ranks[2].end() == 1


@pytest.mark.thorough
@pytest.mark.skipif(not has_memory_cgroup(), reason="limiting memory needs root and a control group for memory (v1)")
def test_a_rank_that_the_kernel_kills_for_memory_is_left_out(tmp_path: Path) -> None:
    how = How(steps=MEMORY_STEPS)
    CGROUP.mkdir()
    try:
        limited = replace(how, environment={"CGROUP": str(CGROUP)}, begin=enter_cgroup, within=outgrow_cgroup)
        with MachineJob(tmp_path, how, {2: limited}) as job:
            assert job.ranks[2].end() == -signal.SIGKILL
            go_on_without_rank_2(job, before_s=20.0)
    finally:
        CGROUP.rmdir()


# --- no room for shared memory ----------------------------------------------------------------------------------------


def no_room_in_dev_shm(rank: Rank) -> None:
    mount_small(Path("/dev/shm"), 64 << 10)


def fill_dev_shm(_rank: Rank, step: int) -> None:
    if step == OUT_AT:
        fill(Path("/dev/shm"))


def no_files_of_memory(_rank: Rank) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (128 << 10,) * 2)


def tell_neighbours(rank: Rank, step: int) -> None:
    if step == MEMORY_STEPS - 1:
        rank.report(near=sorted(rank.transport.endpoint.near()))


@pytest.mark.thorough
@mounts
def test_a_dev_shm_without_room_matters_to_nobody(tmp_path: Path) -> None:
    how = How(steps=MEMORY_STEPS, begin=no_room_in_dev_shm, before=fill_dev_shm, after=tell_neighbours)
    with MachineJob(tmp_path, how) as job:
        assert [each.end() for each in job.ranks] == [0, 0, 0]
        for rank, each in enumerate(job.ranks):
            assert each.reported("values") == job.ranks[0].reported("values") and each.reported("events") == [[]]
            assert each.reported("near") == [sorted({0, 1, 2} - {rank})]


@pytest.mark.thorough
def test_a_rank_that_gets_no_memory_to_share_trains_by_datagram(tmp_path: Path) -> None:
    how = How(steps=MEMORY_STEPS, after=tell_neighbours)
    with MachineJob(tmp_path, how, {2: replace(how, begin=no_files_of_memory)}) as job:
        assert [each.end() for each in job.ranks] == [0, 0, 0]
        for each in job.ranks:
            assert each.reported("values") == job.ranks[0].reported("values") and each.reported("events") == [[]]
        assert [each.reported("near") for each in job.ranks] == [[[1]], [[0]], [[]]]


# --- deadlines under deaths -------------------------------------------------------------------------------------------

LATE, LATE_STEPS = 3, 30


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("deadline", "victim", "number"),
    [
        ("auto", 0, signal.SIGKILL),
        ("auto", LATE, signal.SIGSTOP),
        (0.1, 0, signal.SIGSTOP),
        (0.1, LATE, signal.SIGKILL),
    ],
)
def test_under_a_deadline_those_who_live_go_on(
    deadline: Deadline, victim: int, number: signal.Signals, tmp_path: Path
) -> None:
    """The victim may be the late rank, while its stand-in makes a round."""
    policy = BoundedDrift(bucket_mb=0.05, deadline=deadline)
    how = How(world=4, steps=LATE_STEPS, compute_s=0.03, policy=policy)
    with MachineJob(tmp_path, how, {LATE: replace(how, compute_s=0.4)}) as job:
        job.ranks[1].await_step(10)
        job.ranks[victim].send(number)
        living = [each for each in job.ranks if each.rank != victim]
        assert [each.end() for each in living] == [0, 0, 0]
        for each in living:
            assert each.reported("members") == [[other.rank for other in living]]
            assert each.reported("values") == living[0].reported("values")
            assert each.longest_pause_s() < 20.0

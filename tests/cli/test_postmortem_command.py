"""`stormtorch postmortem`: which rank diverged first, from real and from synthetic flight records."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commands import call
from stormtorch import StormError
from stormtorch.telemetry.postmortem import find, read_flight_records
from stormtorch_lab.jobs.ranks import Member, run_ranks


def operation(number: int, name: str = "all_reduce", size: int = 1000, **more: Any) -> dict[str, Any]:
    return {
        "sequence": number,
        "collective": number,
        "operation": name,
        "shapes": [[size]],
        "dtype": "float32",
        "bytes": 4 * size,
        "started": 100.0 + number,
        "ended": 100.5 + number,
        **more,
    }


def write(folder: Path, rank: int, operations: list[dict[str, Any]], world: int = 4, **more: Any) -> Path:
    path = folder / f"storm-flight-world-rank{rank}-{more.get('job', 1)}.json"
    content = {
        "job": "1",
        "group": "world",
        "rank": rank,
        "ranks": list(range(world)),
        "time": 200.0 + rank,
        "error": f"rank {rank}: timed out",
        "operations": operations,
    }
    path.write_text(json.dumps(content | more))
    return path


def sentence(folder: Path) -> str:
    return find(read_flight_records([folder]))[0].sentence


@pytest.mark.pure
def test_a_rank_that_called_something_else_is_named(tmp_path: Path) -> None:
    for rank in range(4):
        last = "broadcast" if rank == 2 else "all_reduce"
        write(tmp_path, rank, [operation(1), operation(2), operation(3, last), operation(4)])
    expected = "Rank 2 called broadcast where ranks 0, 1, 3 called all_reduce, at collective 3 of group world."
    assert sentence(tmp_path) == expected
    code, text = call("postmortem", str(tmp_path), "--json", str(tmp_path / "found.json"))
    assert code == 0
    assert text.startswith(expected)
    assert "0, 1, 3" in text
    found = json.loads((tmp_path / "found.json").read_text())["findings"][0]
    assert (found["collective"], found["culprits"], found["did"]["2"]) == (3, [2], "broadcast of 4 KB")


@pytest.mark.pure
def test_a_rank_that_gave_another_size_is_named_with_both(tmp_path: Path) -> None:
    for rank in range(4):
        write(tmp_path, rank, [operation(1), operation(2, size=500 if rank == 3 else 1000)])
    assert sentence(tmp_path) == (
        "Rank 3 passed float32 [500], 2 KB to all_reduce where ranks 0, 1, 2 passed float32 [1000], 4 KB, at "
        "collective 2 of group world."
    )


@pytest.mark.pure
def test_sizes_that_may_differ_are_no_difference(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path, rank, [operation(1, "all_to_all", size=100 + rank)], world=2)
    assert sentence(tmp_path).startswith(
        "All 2 ranks of group world did the same collectives and failed at collective 1"
    )


@pytest.mark.pure
def test_a_rank_that_is_behind_and_one_without_a_record_are_named(tmp_path: Path) -> None:
    write(tmp_path, 0, [operation(n) for n in range(1, 6)])
    write(tmp_path, 1, [operation(n) for n in range(1, 5)])
    write(tmp_path, 3, [operation(n) for n in range(1, 6)])
    said = sentence(tmp_path)
    assert said.startswith(
        "Rank 1 never began collective 5 of group world, all_reduce of 4 KB, in which ranks 0, 3 waited"
    )
    assert said.endswith("In addition, rank 2 wrote no record: it was killed, hangs, or its file is missing here.")
    code, text = call("postmortem", str(tmp_path))
    assert code == 0
    assert "not begun" in text
    assert "no record" in text


@pytest.mark.pure
def test_ranks_that_agree_point_at_the_one_without_a_record(tmp_path: Path) -> None:
    for rank in (0, 1, 3):
        write(tmp_path, rank, [operation(7), operation(8, "barrier", 0)])
    assert sentence(tmp_path) == (
        "Rank 2 wrote no record: it was killed, hangs, or its file is missing here. The others agree: all failed at "
        "collective 8, barrier."
    )


@pytest.mark.pure
def test_records_that_begin_at_different_operations_are_compared_where_they_overlap(tmp_path: Path) -> None:
    write(tmp_path, 0, [operation(n) for n in range(50, 300)], world=2)
    write(tmp_path, 1, [operation(n, "broadcast" if n < 60 else "all_reduce") for n in range(60, 301)], world=2)
    assert sentence(tmp_path).startswith("Rank 0 never began collective 300")


@pytest.mark.pure
def test_sends_and_receives_do_not_shift_collectives(tmp_path: Path) -> None:
    send = {**operation(1, "send"), "collective": None, "peer": 1}
    write(tmp_path, 0, [send, send, operation(1)], world=2)
    write(tmp_path, 1, [operation(1)], world=2)
    assert "did the same collectives" in sentence(tmp_path)


@pytest.mark.pure
@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot read"),
        ("", "is not a flight record"),
        ("[]", "is not a flight record"),
        ("{}", "is not a flight record"),
        ("[" * 100_000, "is not a flight record"),
        ('{"group":"g","rank":5,"ranks":[0],"error":"","operations":[]}', "is not a flight record"),
        ('{"group":"g","rank":0,"ranks":[0],"error":"","operations":[{"sequence":-1}]}', "is not a flight record"),
        ('{"group":1,"rank":0,"ranks":[0],"error":"","operations":7}', "is not a flight record"),
    ],
)
def test_a_file_that_is_no_flight_record_is_refused_by_name(tmp_path: Path, content: str | None, problem: str) -> None:
    path = tmp_path / "file.json"
    if content is not None:
        path.write_text(content)
    code, text = call("postmortem", str(path))
    assert code == 2
    assert problem in text
    assert "file.json" in text


@pytest.mark.pure
def test_a_folder_without_records_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = call("postmortem", str(tmp_path))
    assert code == 2
    assert "holds no flight records" in text
    monkeypatch.setenv("STORM_FLIGHT_DIR", str(tmp_path))
    assert call("postmortem") == (code, text)  # without a name, where ranks of this machine write them


@pytest.mark.pure
def test_records_of_two_runs_in_one_folder_are_not_compared(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path, rank, [operation(1, size=8)], world=2, job="old", time=100.0)
    write(tmp_path, 0, [operation(1, size=16)], world=2, job="new")
    code, text = call("postmortem", str(tmp_path))
    assert code == 0
    assert "passed" not in text
    assert "Rank 1 wrote no record" in text
    assert "left out: 2 records of a run that failed at 1970-01-01" in text
    assert "--job old" in text
    code, text = call("postmortem", str(tmp_path), "--job", "old")
    assert "All 2 ranks of group world did the same collectives" in text
    assert "--job new" in text
    code, text = call("postmortem", str(tmp_path), "--job", "other")
    assert code == 2
    assert "there are old, new" in " ".join(text.split())
    assert len(find(read_flight_records([tmp_path]))) == 2


def branching_job(member: Member, folder: str) -> str:
    os.environ["STORM_FLIGHT_DIR"] = folder
    dist.init_process_group("storm", store=member.store, rank=member.rank, world_size=member.world)
    try:
        for _ in range(3):
            dist.all_reduce(torch.ones(1000))
        # Rank 1 has taken another branch, and passes another size.
        dist.all_reduce(torch.ones(500 if member.rank == 1 else 1000))
    except StormError as error:
        return str(error)
    finally:
        dist.distributed_c10d._get_default_group().abort()
    return ""


def test_ranks_that_really_differ_leave_records_that_name_the_culprit(tmp_path: Path) -> None:
    run_ranks(failing_job, 2, (str(tmp_path),), timeout_s=60)  # another run's records in the same folder
    texts = run_ranks(branching_job, 3, (str(tmp_path),), timeout_s=60)
    assert all(texts)
    _, finding = find(read_flight_records([tmp_path]))
    assert len(finding.flights) == 3
    assert finding.number == 4
    assert finding.culprits == [1]
    assert (
        "Rank 1 passed float32 [500], 2 KB to all_reduce where ranks 0, 2 passed float32 [1000], 4 KB"
        in finding.sentence
    )
    first = next(flight for flight in finding.flights if flight.rank == 0)
    assert [first.collectives[number].state for number in range(1, 5)] == ["done", "done", "done", "failed"]


@pytest.mark.pure
def test_the_analyser_of_torch_finds_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fr_trace = pytest.importorskip("torch.distributed.flight_recorder.fr_trace", reason="this torch has no analyser")
    names = ["all_reduce", "broadcast", "reduce_scatter", "all_gather", "barrier", "all_reduce"]
    for rank in range(3):
        did = []
        for number, name in enumerate(names, 1):
            given, results = 3 if name == "reduce_scatter" else 1, 3 if name == "all_gather" else 1
            called = operation(number, "broadcast" if (rank, number) == (1, 6) else name)
            did.append({**called, "shapes": [[10]] * given, "result_shapes": [[10]] * results})
        write(tmp_path, rank, did, world=3)
    assert call("postmortem", str(tmp_path), "--torch", str(tmp_path / "traces"))[0] == 0
    with caplog.at_level("INFO"):
        fr_trace.main([str(tmp_path / "traces" / "0-world"), "--prefix", "storm_rank_"])
    assert caplog.text.count("has errors") == 1
    assert "Collective sequence number: 6 has errors" in caplog.text
    assert "Culprit rank 1; Error type: COLLECTIVE_TYPE_MISMATCH" in caplog.text


def failing_job(member: Member, folder: str) -> None:
    os.environ["STORM_FLIGHT_DIR"] = folder
    dist.init_process_group("storm", store=member.store, rank=member.rank, world_size=member.world)
    dist.all_reduce(torch.ones(10))
    try:
        if member.rank == 1:
            raise ValueError("a bad sample")
        dist.all_reduce(torch.ones(10))
    except (StormError, ValueError):
        # As at the end of a program: the transport is closed while the error is on its way.
        dist.destroy_process_group()


def test_a_rank_that_failed_by_itself_leaves_a_record_too(tmp_path: Path) -> None:
    run_ranks(failing_job, 2, (str(tmp_path),), timeout_s=60)
    (finding,) = find(read_flight_records([tmp_path]))
    assert finding.silent == []
    assert finding.sentence.startswith("Rank 1 never began collective 2 of group")
    assert next(each for each in finding.flights if each.rank == 1).error == "ValueError: a bad sample"

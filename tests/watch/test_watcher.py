"""The watcher: polling, and silence by the watcher's clock, independent of the clocks of ranks."""

import os
import time
from pathlib import Path

import pytest

from records import START, make_records
from stormtorch.telemetry.record_files import read_run
from stormtorch.telemetry.records import Record, line_of
from stormtorch.watch.sources import FolderSource
from stormtorch.watch.watcher import Watcher

pytestmark = pytest.mark.pure


def write(folder: Path, records: dict[int, list[Record]], behind_s: dict[int, float]) -> None:
    """Writes a run whose last records are of now, by clocks that are behind by so many seconds."""
    last = max(each["time"] for mine in records.values() for each in mine)
    for rank, mine in records.items():
        shift = time.time() - last - behind_s.get(rank, 0.0)
        lines = [line_of(each | {"time": each["time"] + shift}) + "\n" for each in mine]
        (folder / f"rank-{rank}-0-{rank}.jsonl").open("a").writelines(lines)


def states(watcher: Watcher) -> list[str]:
    return [each["state"] for each in watcher.snapshot()["ranks"]]


def test_a_rank_whose_clock_is_wrong_by_minutes_is_not_silent(tmp_path: Path) -> None:
    records = make_records(3)
    write(tmp_path, {rank: mine[:-2] for rank, mine in records.items()}, {1: 120.0, 2: -120.0})
    watcher = Watcher(FolderSource(tmp_path))
    watcher.read()
    assert states(watcher) == ["running"] * 3
    write(tmp_path, {rank: mine[-2:] for rank, mine in records.items()}, {1: 3600.0, 2: -3600.0})
    watcher.read()
    assert states(watcher) == ["running"] * 3
    assert [each["told_s"] < 5.0 for each in watcher.snapshot()["ranks"]] == [True] * 3


def test_a_rank_that_stopped_is_silent_also_if_its_clock_is_ahead(tmp_path: Path) -> None:
    write(tmp_path, make_records(3), {2: -3600.0})
    path = tmp_path / "rank-2-0-2.jsonl"
    os.utime(path, (time.time() - 40, time.time() - 40))
    watcher = Watcher(FolderSource(tmp_path))
    watcher.read()
    assert states(watcher) == ["running", "running", "silent"]
    assert watcher.snapshot()["verdict"][0]["text"].startswith("Host c (rank 2) has not reported for 4")


def test_a_run_that_was_copied_is_as_old_as_its_records(tmp_path: Path) -> None:
    write(tmp_path, make_records(2), {0: 7200.0, 1: 7200.0})
    watcher = Watcher(FolderSource(tmp_path))
    watcher.read()
    assert watcher.snapshot()["state"] == "silent"
    assert watcher.snapshot()["ranks"][0]["told_s"] == pytest.approx(7200.0, abs=5.0)


def test_of_two_runs_in_a_folder_the_latest_is_watched_also_if_it_begins_meanwhile(tmp_path: Path) -> None:
    write(tmp_path, make_records(3), {rank: 7200.0 for rank in range(3)})
    watcher = Watcher(FolderSource(tmp_path))
    watcher.read()
    assert len(watcher.snapshot()["ranks"]) == 3
    for rank, mine in make_records(2, rank_job="second").items():
        shift = time.time() - max(each["time"] for each in mine)
        lines = [line_of(each | {"time": each["time"] + shift}) + "\n" for each in mine]
        (tmp_path / f"rank-{rank}-0-{10 + rank}.jsonl").write_text("".join(lines))
    watcher.read()
    shown = watcher.snapshot()
    assert [each["rank"] for each in shown["ranks"]] == [0, 1]
    assert shown["state"] == "running"
    assert shown["source"].endswith("without 3 files of earlier runs")
    # A file of the first run still grows, as where both have written to the folder at once.
    with (tmp_path / "rank-2-0-2.jsonl").open("a") as file:
        file.write(line_of(make_records(3)[2][-1]) + "\n")
    watcher.read()
    assert [each["rank"] for each in watcher.snapshot()["ranks"]] == [0, 1]
    assert {who.pid for who in read_run(tmp_path)} == {10, 11}


def test_nobody_is_silent_in_a_run_that_is_over(tmp_path: Path) -> None:
    records = make_records(3)
    for rank in (0, 1):
        records[rank].append({"kind": "end", "time": START + 20, "step": 80, "why": "done"})
    write(tmp_path, records, dict.fromkeys(range(3), 7200.0))
    watcher = Watcher(FolderSource(tmp_path))
    watcher.read()
    found = watcher.snapshot()
    assert (found["state"], states(watcher)) == ("done", ["done", "done", "gone"])
    assert found["verdict"][0]["text"] == (
        "Host c (rank 2) died or was cut off after step 79, and 2 of 3 ranks went on to the end"
    )


def test_a_rank_left_out_of_a_view_comes_back_by_what_it_tells_and_not_by_its_clock(tmp_path: Path) -> None:
    records = make_records(3)
    for rank in (0, 1):
        records[rank].append({"kind": "view", "time": START + 5, "number": 2, "step": 20, "members": [0, 1]})
    write(tmp_path, records, {2: 120.0})
    watcher = Watcher(FolderSource(tmp_path))
    watcher.read()
    assert states(watcher) == ["running"] * 3, "it has reported for 15 s since the view without it"


@pytest.mark.parametrize("odd", [1.0, 3.9e9])
def test_a_time_that_cannot_be_is_left_out_and_said_so_once(tmp_path: Path, odd: float) -> None:
    write(tmp_path, make_records(2), {})
    with (tmp_path / "rank-1-0-1.jsonl").open("a") as file:
        for _ in range(3):
            file.write(line_of({"kind": "steps", "time": odd, "step": 1, "steps": 1, "seconds": 0.1}) + "\n")
    watcher = Watcher(FolderSource(tmp_path))
    watcher.read()
    found = watcher.snapshot()
    assert found["series"]["width_s"] == 1.0
    assert states(watcher) == ["running"] * 2
    said = [each["text"] for each in found["notes"] if "clock" in each["text"]]
    assert said == ["Rank 1 has an implausible clock: records with such times are skipped"]

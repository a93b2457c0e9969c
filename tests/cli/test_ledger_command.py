"""`stormtorch ledger`: the summary first, from ledgers and from records."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from commands import call
from stormtorch.telemetry.histories import one_sentence, read_histories
from stormtorch.telemetry.ledger import Ledger, LedgerRow
from stormtorch.telemetry.records import ProcessId, line_of

pytestmark = pytest.mark.pure


def write_ledger(path: Path, steps: int = 20) -> Path:
    ledger = Ledger()
    ledger.follow(path)
    for step in range(steps):
        events = ["view 2 begins at step 7 with 2 ranks"] if step == 7 else []
        ledger.add(
            LedgerRow(
                step,
                gradients={1: 0.9, 2: 0.5},
                broadcast={1: 1.0},
                gradient_wait_s=0.01,
                pair_drift=1e-6,
                events=events,
            )
        )
    return path


def write_run(folder: Path) -> Path:
    folder.mkdir()
    for rank in range(3):
        records: list[dict[str, Any]] = [{"kind": "rank", "time": 0.0, "rank": rank}]
        records += [
            {
                "kind": "steps",
                "time": float(second),
                "step": 10 * second + 9,
                "steps": 10,
                "seconds": 1.0,
                "gradient_wait_s": 0.2,
                "broadcast_wait_s": 0.1,
                "arrived": 0.95,
                "gradients": {str(peer): 0.6 if (rank, peer) == (0, 2) else 1.0 for peer in range(3) if peer != rank},
                "bytes_sent": 1000,
            }
            for second in range(4)
        ]
        records.append(
            {"kind": "links", "time": 4.0, "links": {"2": {"loss": 0.4, "rtt_s": 0.04}} if rank == 0 else {}}
        )
        records.append({"kind": "end", "time": 5.0, "why": "done" if rank else "MemoryError: no [red]memory"})
        lines = "".join(f"{line_of(each)}\n" for each in records)
        (folder / ProcessId(rank, 0, 1).file_name).write_text(lines + '{"kind":"st')
    return folder


def test_a_run_is_told_in_one_sentence_first(tmp_path: Path) -> None:
    code, text = call("ledger", str(write_run(tmp_path / "run")))
    assert code == 0
    first = " ".join(text.split("means of a step")[0].split())
    assert first.startswith("3 ranks made 40 steps: 95.00 % of the chunks arrived")
    assert "waiting for others took 30 % of the time (30.0 ms a step)" in first
    assert "the worst link is from rank 2 to rank 0, where 60.00 % arrived" in first
    assert "rank 0 ended with MemoryError: no [red]memory" in first
    assert "40.0 ms" in text, "the round trip of the worst link"


def test_a_ledger_is_told_without_wall_time(tmp_path: Path) -> None:
    path = write_ledger(tmp_path / "ledger.jsonl")
    accounts = read_histories([path])
    assert "made 20 steps: 80.00 % of the chunks arrived, waiting for others took 10.0 ms a step" in one_sentence(
        accounts
    )
    assert "from rank 2 to" in one_sentence(accounts)
    code, text = call("ledger", str(path))
    assert code == 0
    assert "view 2 begins at step 7" in text


def test_rows_of_averaged_models_count_all_their_steps(tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.follow(tmp_path / "ledger.jsonl")
    for step in (3, 7, 11):
        ledger.add(LedgerRow(step))
    (history,) = read_histories([tmp_path / "ledger.jsonl"])
    assert history.steps == 1 + 4 + 4


@pytest.mark.thorough
def test_the_files_that_were_asked_for_are_written(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    outputs = {kind: tmp_path / f"out.{kind}" for kind in ("csv", "json", "png")}
    options = ("--csv", str(outputs["csv"]), "--json", str(outputs["json"]), "--plot", str(outputs["png"]))
    assert call("ledger", str(run), str(write_ledger(tmp_path / "l.jsonl", 1000)), *options)[0] == 0
    rows = list(csv.DictReader(outputs["csv"].open()))
    assert len(rows) == 12 + 1000
    assert (rows[0]["rank"], rows[0]["steps"], rows[0]["gradient_wait_s"]) == ("rank 0", "10", "0.2")
    data = json.loads(outputs["json"].read_text())
    assert data["answer"].startswith("4 ranks")
    assert data["links"][0]["source"] == "rank 2"
    assert outputs["png"].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot read"),
        ("", "contains neither ledger rows nor step records"),
        ("hello\n[1]\n", "contains neither ledger rows nor step records"),
        ('{"kind":"rank","time":1,"rank":0}\n', "no step was complete"),
    ],
)
def test_a_file_that_says_nothing_is_refused_by_name(tmp_path: Path, content: str | None, problem: str) -> None:
    path = tmp_path / "file.jsonl"
    if content is not None:
        path.write_text(content)
    code, text = call("ledger", str(path))
    assert code == 2
    assert problem in text
    assert "file.jsonl" in text


def test_an_empty_folder_says_how_to_fill_it(tmp_path: Path) -> None:
    code, text = call("ledger", str(tmp_path))
    assert code == 2
    assert "STORM_RECORD=" in text

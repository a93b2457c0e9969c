"""Parsing of untrusted record lines, and files that grow while they are read."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stormtorch.telemetry.record_files import Folder, Tail, read_run
from stormtorch.telemetry.records import KINDS, MOST_LINE_BYTES, ProcessId, checked, line_of, parse, process_of_file

pytestmark = pytest.mark.pure

STEPS = {
    "kind": "steps",
    "time": 1700000000.1234,
    "n": 3,
    "step": 7,
    "steps": 2,
    "seconds": 0.5,
    "gradients": {"1": 0.9},
    "pair_drift": None,
}
EVENT = {"kind": "event", "time": 1.0, "n": 0, "step": 0, "text": "something"}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
NAMES = ["time", "n", "rank", "step", "steps", "seconds", "links", "number", "members", "text", "why", "health"]


def test_a_record_comes_back_from_its_line() -> None:
    record = parse(line_of(STEPS))
    assert record == {**STEPS, "time": 1700000000.123}


def test_numbers_that_json_does_not_have_become_null_and_are_left_out() -> None:
    line = line_of({**STEPS, "loss": math.nan, "pair_drift": math.inf})
    assert json.loads(line)["loss"] is None
    record = parse(line)
    assert record is not None
    assert "loss" not in record
    assert record["pair_drift"] is None


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"kind":"steps"}',
        b'{"kind":"steps","time":"now","step":1,"steps":1,"seconds":1}',
        b'{"kind":"steps","time":1e999,"step":1,"steps":1,"seconds":1}',
        b'{"kind":"steps","time":1,"step":-1,"steps":1,"seconds":1}',
        b'{"kind":"steps","time":1,"step":' + b"9" * 5000 + b',"steps":1,"seconds":1}',
        b'{"kind":"strange","time":1}',
        b'{"kind":["steps"],"time":1}',
        line_of(EVENT).encode() + b" " * MOST_LINE_BYTES,
    ],
)
def test_a_line_that_is_no_record_is_none(line: bytes) -> None:
    assert parse(line) is None


def test_what_is_wrong_in_a_record_is_left_out_and_the_rest_stays() -> None:
    wrong = {"arrived": "all", "missing": ["x"], "gradients": {"1": 0.5, "x": 1.0}, "evil": "<script>"}
    record = checked({**STEPS, **wrong})
    assert record is not None
    assert record["gradients"] == {"1": 0.5}
    assert not {"arrived", "missing", "evil"} & set(record)


def test_text_has_no_letters_that_move_a_cursor_and_no_more_than_a_page() -> None:
    record = checked({**EVENT, "text": "\x1b[2J" + "a" * 10_000})
    assert record is not None
    assert "\x1b" not in record["text"]
    assert len(record["text"]) == 2000


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(KINDS), st.dictionaries(st.sampled_from(NAMES), VALUES))
def test_whatever_a_record_holds_reading_raises_nothing_and_keeps_the_types(kind: str, said: dict[str, Any]) -> None:
    record = checked({**said, "kind": kind})
    if record is not None:
        assert math.isfinite(record["time"])
        assert all(type(each) is int for each in record.get("members", []))
        assert parse(line_of(record)) is not None


def test_a_file_that_grows_is_read_on_and_half_a_line_waits(tmp_path: Path) -> None:
    path = tmp_path / "rank-0-0-1.jsonl"
    tail = Tail(path)
    assert tail.read() == []
    line = line_of(EVENT)
    path.write_text(f"{line}\nnonsense\n{line[:10]}")
    assert [each["text"] for each in tail.read()] == ["something"]
    assert tail.skipped == 1
    assert tail.read() == []
    with path.open("a") as file:
        file.write(f"{line[10:]}\n")
    assert len(tail.read()) == 1
    path.write_text(f"{line}\n")  # shorter than before: another run
    assert len(tail.read()) == 1


def test_a_line_without_an_end_fills_no_memory_and_hides_nothing_after_it(tmp_path: Path) -> None:
    path = tmp_path / "rank-0-0-1.jsonl"
    path.write_bytes(b"x" * (3 * MOST_LINE_BYTES) + b"\n" + line_of(EVENT).encode() + b"\n")
    tail = Tail(path)
    assert len(tail.read()) == 1
    assert tail.skipped == 1


def test_a_folder_gives_each_process_its_new_records(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "later")
    assert folder.read() == {}
    (tmp_path / "later").mkdir()
    for name in ("rank-0-0-11.jsonl", "rank-1-2-12.jsonl", "notes.txt", "rank-x-0-1.jsonl"):
        (tmp_path / "later" / name).write_text(line_of(EVENT) + "\n")
    assert list(folder.read()) == [ProcessId(0, 0, 11), ProcessId(1, 2, 12)]
    assert folder.read() == {}
    assert ProcessId(1, 2, 12).file_name == "rank-1-2-12.jsonl"
    assert process_of_file(tmp_path / "rank-1-2-12.jsonl") == ProcessId(1, 2, 12)


def test_a_run_that_is_not_there_or_empty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        read_run(tmp_path / "nothing")
    with pytest.raises(ValueError, match="holds no records"):
        read_run(tmp_path)


def test_a_pipe_among_the_files_of_a_run_is_refused_and_the_others_are_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pipe = tmp_path / "rank-1-0-1.jsonl"
    os.mkfifo(pipe)
    (tmp_path / "rank-0-0-1.jsonl").write_text(
        json.dumps({"kind": "event", "time": 1.7e9, "step": 1, "text": "x"}) + "\n"
    )
    folder = Folder(tmp_path)
    assert [who.rank for who in folder.read()] == [0]
    assert folder.read() == {}
    assert [each.getMessage() for each in caplog.records] == [
        f"{pipe} is not a regular file: records can be read only from regular files"
    ]
    with pytest.raises(ValueError, match="not a regular file"):
        read_run(pipe)

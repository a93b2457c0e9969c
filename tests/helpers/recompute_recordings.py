"""Reads the recordings of a recomputed job."""

from __future__ import annotations

import logging
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SILENT_S = 10.0
"""After which a rank says what it waits for."""
_SLACK_S = 1.5


class Differs(Exception):
    """The job's state differs from the recomputed one."""


@dataclass
class Process:
    """The book of one process."""

    name: str
    records: list[dict[str, Any]]


def read(folder: Path) -> list[Process]:
    """Reads all books. The last record of one may be cut off, where its process was killed."""
    found = []
    for path in sorted(folder.glob("book-*")):
        records = []
        with path.open("rb") as file:
            while True:
                try:
                    records.append(pickle.load(file))
                except (EOFError, pickle.UnpicklingError):
                    break
        if any(each["kind"] == "round" for each in records):
            _mark_void(records)
        found.append(Process(path.name.removeprefix("book-"), records))
    return found


def _mark_void(records: list[dict[str, Any]]) -> None:
    """Marks what a session does after a round that was not completed: others have left it out, and it begins anew."""
    under_way: set[int] = set()
    for record in records:
        session, kind = record.get("session"), record["kind"]
        if session is None:
            continue
        if kind == "given":
            under_way.add(session)
        elif kind in ("round", "view"):
            under_way.discard(session)
        elif session in under_way and kind in ("final", "stepped", "sent", "arrived"):
            record["kind"] = f"void {kind}"


def check_end(process: Process) -> None:
    """Raises an error where a process has neither ended as it should, nor said that others went on without it."""
    last = process.records[-1] if process.records else None
    failed = [each for each in process.records if each["kind"] == "failed"]
    if failed:
        raise Differs(f"process {process.name} has failed: {failed[0]['words']}")
    kinds = {each["kind"] for each in process.records}
    if last is None or kinds & {"end", "died", "left", "leaves"}:
        return
    said = [each["words"] for each in process.records if each["kind"] == "log"]
    if not any("let in" in each or "majority" in each for each in said[-2:]):
        raise Differs(f"process {process.name} hangs after {last['kind']!r} at step {last.get('steps')}")


def longest_wait(process: Process) -> float:
    """Returns the seconds of the longest wait of a process of which nothing was said.

    Raises:
        Differs: It is longer than ten seconds, and what a busy machine adds.
    """
    longest, last = 0.0, None
    for record in process.records:
        if last is not None and not (last["kind"] == "paused" or _says_why(last)):
            waited = record["at"] - last["at"]
            longest = max(longest, waited)
            if waited > SILENT_S + _SLACK_S:
                raise Differs(
                    f"process {process.name} waited {waited:.1f} s after {last['kind']!r} at step {last.get('steps')}, "
                    "and said nothing"
                )
        last = record
    return longest


def _says_why(record: dict[str, Any]) -> bool:
    """Whether a record is a warning from which one knows what a rank waits for."""
    if record["kind"] != "log" or record["level"] < logging.WARNING:
        return False
    return not any(each in record["words"] for each in (" begins at step ", "has joined a running job"))

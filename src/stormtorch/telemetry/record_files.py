"""Reading of record files: at once, or continuously while they grow."""

from __future__ import annotations

import logging
import math
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stormtorch.telemetry.records import MOST_LINE_BYTES, ProcessId, Record, parse, process_of_file

_log = logging.getLogger("stormtorch")


class Tail:
    """Follows a growing file: each call returns the new records.

    A file that was truncated or replaced is read from its beginning.

    Args:
        path: The file; it need not exist yet.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.skipped = 0
        """Number of lines that were not records."""
        self.age_s: float | None = None
        """Seconds between the last change of the file and its last read; None once the file has been read to its end,
        because later records are fresh."""
        self._read_all = False
        self._place = 0
        self._inode = -1
        self._rest = b""
        self._too_long = False

    def read(self, most_bytes: int | None = None) -> list[Record]:
        """Returns the records added since the last call, from at most `most_bytes`; none without a file.

        Raises:
            ValueError: It is not a regular file, but for example a pipe, which cannot be read repeatedly.
        """
        try:
            # O_NONBLOCK: opening a pipe would wait for a writer.
            with open(os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                about = os.fstat(file.fileno())
                if not stat.S_ISREG(about.st_mode):
                    raise ValueError(f"{self.path} is not a regular file: records can be read only from regular files")
                if about.st_ino != self._inode or about.st_size < self._place:
                    self._inode, self._place, self._rest, self._too_long = about.st_ino, 0, b"", False
                    self._read_all = False
                self.age_s = None if self._read_all else max(0.0, time.time() - about.st_mtime)
                file.seek(self._place)
                found = list(self._records(file, most_bytes))
                self._read_all = self._read_all or self._place >= about.st_size
                return found
        except OSError:
            return []

    def _records(self, file: Any, most_bytes: int | None) -> Iterator[Record]:
        left = math.inf if most_bytes is None else most_bytes
        while left > 0 and (block := file.read(int(min(left, 1 << 20)))):
            left -= len(block)
            self._place += len(block)
            *lines, self._rest = (self._rest + block).split(b"\n")
            for line in lines:
                # The rest of a line that was too long is not a line.
                record, self._too_long = (None if self._too_long else parse(line)), False
                if record is None:
                    self.skipped += bool(line.strip())
                else:
                    yield record
            if len(self._rest) > MOST_LINE_BYTES:
                self._rest, self._too_long = b"", True


class Folder:
    """Follows the folder of a run, in which files appear and grow. Of several runs, it reads the one that began last.

    Args:
        path: The folder; it need not exist yet.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.job: str | None = None
        """Id of the run that is read; None while there is none."""
        self._tails: dict[ProcessId, Tail] = {}
        self._jobs: dict[ProcessId, tuple[float, str]] = {}
        self._refused: set[Path] = set()

    def read(self, most_bytes: int | None = None) -> dict[ProcessId, list[Record]]:
        """Returns the records added since the last call, by process; processes without new records are omitted.

        Args:
            most_bytes: Most bytes to read of each file; the next call continues from there.
        """
        try:
            found = [(who, path) for path in self.path.iterdir() if (who := process_of_file(path)) is not None]
        except OSError:
            found = []
        for who, path in found:
            self._tails.setdefault(who, Tail(path))
        read = {who: self._read(tail, most_bytes) for who, tail in sorted(self._tails.items()) if self._is_of_job(who)}
        for who, records in read.items():
            first = next((each for each in records if each["kind"] == "rank"), None)
            if first is not None:
                self._jobs.setdefault(who, (first["time"], str(first.get("job", ""))))
        began: dict[str, float] = {}
        for time_, job in self._jobs.values():
            began[job] = min(time_, began.get(job, time_))
        self.job = max(began, key=lambda job: began[job], default=self.job)
        return {who: records for who, records in read.items() if records and self._is_of_job(who)}

    def _is_of_job(self, who: ProcessId) -> bool:
        return who not in self._jobs or self._jobs[who][1] == self.job

    @property
    def others(self) -> int:
        """Number of files of earlier runs, which are skipped."""
        return sum(not self._is_of_job(who) for who in self._jobs)

    def _read(self, tail: Tail, most_bytes: int | None) -> list[Record]:
        try:
            return tail.read(most_bytes)
        except ValueError as error:
            if tail.path not in self._refused:  # warn once, and keep reading the other files
                self._refused.add(tail.path)
                _log.warning("%s", error)
            return []

    def age_s(self, who: ProcessId) -> float | None:
        """Returns the age of a file at its first read; None once it has been read to its end: see `Tail.age_s`."""
        return self._tails[who].age_s

    @property
    def skipped(self) -> int:
        """Number of lines of all files that were not records."""
        return sum(tail.skipped for tail in self._tails.values())


def read_run(path: str | Path) -> dict[ProcessId, list[Record]]:
    """Reads all records of a run: of a folder, or of one file.

    Raises:
        ValueError: There is no such file or folder, it is not a regular file, or it holds no records.
    """
    path = Path(path)
    if path.is_dir():
        folder = Folder(path)
        found = folder.read()
        if folder.others:
            what = "file" if folder.others == 1 else "files"
            _log.warning("%s: %d %s of earlier runs skipped; name these files to read them", path, folder.others, what)
    elif path.exists():
        records = Tail(path).read()
        first = next((each for each in records if each["kind"] == "rank"), {})
        who = process_of_file(path) or ProcessId(first.get("rank", 0), first.get("incarnation", 0), first.get("pid", 0))
        found = {who: records} if records else {}
    else:
        raise ValueError(f"{path} does not exist")
    if not found:
        raise ValueError(f"{path} holds no records: start the training with STORM_RECORD={path}")
    return found

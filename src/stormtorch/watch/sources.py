"""Sources of records: the folder of a run, or the ranks of a running job over the network."""

import os
import re
from pathlib import Path
from typing import Protocol

from stormtorch.joining.live import LiveJob
from stormtorch.telemetry.record_files import Folder
from stormtorch.telemetry.records import ProcessId, Record

_KEY_VARIABLE = "STORM_KEY"
# Per file and read: a run of days has gigabytes of records, too much for memory at once.
_MOST_BYTES = 1 << 20


class Source(Protocol):
    """Source of new records."""

    in_parts: bool
    """Whether a read returns only a part of the new records, so that the next one may follow at once."""

    @property
    def name(self) -> str:
        """Description of the source."""

    @property
    def job(self) -> str | None:
        """Id of the run whose records it returns; it may change. None while there are none."""

    def read(self) -> dict[ProcessId, list[Record]]:
        """Returns new records by process."""

    def age_s(self, who: ProcessId) -> float | None:
        """Returns the age of a process's newest records at the last read, in seconds; None if they are fresh."""

    def close(self) -> None:
        """Releases its resources."""


class FolderSource:
    """Reads the files that ranks write with `STORM_RECORD=DIR`.

    Args:
        path: The folder; it may be empty as yet.
    """

    def __init__(self, path: Path) -> None:
        self.in_parts = True
        self._folder = Folder(path)

    @property
    def name(self) -> str:
        """The folder, and the number of its files that are skipped."""
        others = self._folder.others
        return f"{self._folder.path}" + (f", without {others} files of earlier runs" if others else "")

    @property
    def job(self) -> str | None:
        """Id of the run that began last."""
        return self._folder.job

    def read(self) -> dict[ProcessId, list[Record]]:
        """Returns the records of new lines."""
        return self._folder.read(_MOST_BYTES)

    def age_s(self, who: ProcessId) -> float | None:
        """Returns the age of a file at its first read; None once it grows while it is watched."""
        return self._folder.age_s(who)

    def close(self) -> None:
        """Does nothing: files are open only while they are read."""


class LiveSource:
    """Requests records from the ranks of a running job, which keep the latest ones in memory.

    Args:
        where: HOST:PORT of any rank, or several separated by commas.
        key: The job's key, if it has one.
    """

    def __init__(self, where: str, key: bytes | None) -> None:
        self.name, self.job, self.in_parts = where, "", False
        self._live = LiveJob(where, key=key)

    def read(self) -> dict[ProcessId, list[Record]]:
        """Returns new records. Raises `StormError` or `OSError` if no rank has ever answered."""
        return self._live.read()

    def age_s(self, who: ProcessId) -> float | None:
        """Returns None: a rank that answers runs."""
        return None

    def close(self) -> None:
        """Closes all connections."""
        self._live.close()


def source_of(job: str) -> Source:
    """Returns the source for a folder or for HOST:PORT of a rank.

    Raises:
        ValueError: It is neither; the message says what is expected.
    """
    path = Path(job)
    if path.is_dir():
        return FolderSource(path)
    if re.fullmatch(r"[^/]+:\d{1,5}", job):
        key = os.environ.get(_KEY_VARIABLE, "")
        return LiveSource(job, key.encode() or None)
    if path.exists():
        raise ValueError(f"{job} is a file: name its folder, which holds one file per process")
    raise ValueError(f"there is no folder {job}: start the job with STORM_RECORD={job}, or name HOST:PORT of a rank")

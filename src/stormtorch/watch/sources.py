"""Where records come from: the folder of a run, or a live rank that is asked over the network."""

import os
import re
from pathlib import Path
from typing import Protocol

from stormtorch.joining.live import LiveJob
from stormtorch.telemetry.record_files import Folder
from stormtorch.telemetry.records import ProcessId, Record

_KEY_VARIABLE = "STORM_KEY"
# Of each file at a time: a run of days has gigabytes, which would not fit into memory at once.
_MOST_BYTES = 1 << 20


class Source(Protocol):
    """Place that has new records from time to time."""

    in_parts: bool
    """Whether a read returns only a part of what is new, so that the next one may follow at once."""

    @property
    def name(self) -> str:
        """What it is, in words."""

    @property
    def job(self) -> str | None:
        """The run whose records it has; another one may begin. None while it has none."""

    def read(self) -> dict[ProcessId, list[Record]]:
        """Returns the records that are new, by process."""

    def age_s(self, who: ProcessId) -> float | None:
        """Returns how many seconds before the last read its newest records were written; None if they came with it."""

    def close(self) -> None:
        """Gives back what it holds."""


class FolderSource:
    """Reads the files that ranks write with `STORM_RECORD=DIR`.

    Args:
        path: The folder; it need not have files yet.
    """

    def __init__(self, path: Path) -> None:
        self.in_parts = True
        self._folder = Folder(path)

    @property
    def name(self) -> str:
        """The folder, and how many files in it are left out."""
        others = self._folder.others
        return f"{self._folder.path}" + (f", without {others} files of earlier runs" if others else "")

    @property
    def job(self) -> str | None:
        """The run that began last."""
        return self._folder.job

    def read(self) -> dict[ProcessId, list[Record]]:
        """Returns what stands on lines that are new."""
        return self._folder.read(_MOST_BYTES)

    def age_s(self, who: ProcessId) -> float | None:
        """Returns the age of a file that is read for the first time; None once it grows while it is watched."""
        return self._folder.age_s(who)

    def close(self) -> None:
        """Does nothing: files are open only while they are read."""


class LiveSource:
    """Asks the ranks of a running job, which keep their latest records in memory.

    Args:
        where: HOST:PORT of any rank, or several divided by commas.
        key: The job's key, if it has one.
    """

    def __init__(self, where: str, key: bytes | None) -> None:
        self.name, self.job, self.in_parts = where, "", False
        self._live = LiveJob(where, key=key)

    def read(self) -> dict[ProcessId, list[Record]]:
        """Returns what ranks have told. Raises a `StormError` or an `OSError` if nobody ever answered."""
        return self._live.read()

    def age_s(self, who: ProcessId) -> float | None:
        """Returns None: a rank that answers runs."""
        return None

    def close(self) -> None:
        """Ends all talks."""
        self._live.close()


def source_of(job: str) -> Source:
    """Returns the source that a user means: a folder, or HOST:PORT of a rank.

    Raises:
        ValueError: It is neither; the message says what would be.
    """
    path = Path(job)
    if path.is_dir():
        return FolderSource(path)
    if re.fullmatch(r"[^/]+:\d{1,5}", job):
        key = os.environ.get(_KEY_VARIABLE, "")
        return LiveSource(job, key.encode() or None)
    if path.exists():
        raise ValueError(f"{job} is a file: name its folder, in which every rank has a file of its own")
    raise ValueError(f"there is no folder {job}: start the job with STORM_RECORD={job}, or name HOST:PORT of a rank")

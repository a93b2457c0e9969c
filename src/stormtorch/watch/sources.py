"""Where records come from: the folder of a run, or a live rank that is asked over the network."""

from pathlib import Path
from typing import Protocol

from stormtorch.results.record_files import Folder
from stormtorch.watch.job import Job


class Source(Protocol):
    """Place that has new records from time to time."""

    name: str
    """What it is, in words."""

    def read(self, job: Job) -> bool:
        """Adds what is new to the job; returns whether there was anything."""

    def close(self) -> None:
        """Gives back what it holds."""


class FolderSource:
    """Reads the files that ranks write with `STORM_RECORD=DIR`.

    Args:
        path: The folder; it need not have files yet.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._folder = Folder(path)

    def read(self, job: Job) -> bool:
        """Adds the lines that are new."""
        found = self._folder.read()
        for who, records in found.items():
            for record in records:
                job.add(who.file_name, record)
        return bool(found)

    def close(self) -> None:
        """Does nothing: files are open only while they are read."""


def source_of(job: str) -> Source:
    """Returns the source that a user means: a folder, or HOST:PORT of a rank.

    Raises:
        ValueError: It is neither; the message says what would be.
    """
    path = Path(job)
    if path.is_dir():
        return FolderSource(path)
    if path.exists():
        raise ValueError(f"{job} is a file: name its folder, in which every rank has a file of its own")
    raise ValueError(f"there is no folder {job}: start the job with STORM_RECORD={job}, or name HOST:PORT of a rank")

"""File of a process's step records in the folder of a run. A full disk loses records but never stops training."""

import errno
import logging
from collections import deque
from pathlib import Path

from stormtorch.telemetry.line_file import LineFile
from stormtorch.telemetry.records import ProcessId

_log = logging.getLogger("stormtorch")

_MOST_WAITING = 2000
_FULL = (errno.ENOSPC, errno.EDQUOT)


class RecordFile:
    """Appends records to the file of a process, and keeps the latest in memory while writing fails.

    Args:
        folder: Folder of the run; it is made if it is missing.
        who: The process.

    Raises:
        ValueError: The file cannot be written, for another reason than a full disk.
    """

    def __init__(self, folder: str | Path, who: ProcessId) -> None:
        self.path = Path(folder) / who.file_name
        self._rank = who.rank
        self._file: LineFile | None = None
        self._waiting: deque[bytes] = deque(maxlen=_MOST_WAITING)
        self._lost = 0
        self._failed = False
        try:
            self._open()
        except OSError as error:
            if error.errno not in _FULL:
                raise ValueError(
                    f"rank {who.rank}: cannot write records to {self.path}: {error.strerror or error}; name a folder "
                    "that this process may write to (STORM_RECORD, or session.record)"
                ) from error

    def add(self, lines: list[bytes]) -> None:
        """Writes records. A failure is logged once, and the next call tries again."""
        self._lost += max(len(self._waiting) + len(lines) - _MOST_WAITING, 0)
        self._waiting.extend(lines)
        if not self._waiting:
            return
        error = self._write()
        if error is None:
            if self._failed:
                _log.warning(
                    "rank %d: records can be written to %s again; it lacks %d of them",
                    self._rank,
                    self.path,
                    self._lost,
                )
            self._failed, self._lost = False, 0
            self._waiting.clear()
        elif not self._failed:
            self._failed = True
            _log.warning(
                "rank %d: cannot write records to %s: %s. The latest %d are kept and written once that is possible; "
                "training continues",
                *(self._rank, self.path, error, _MOST_WAITING),
            )

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = LineFile(self.path)

    def _write(self) -> OSError | None:
        try:
            if self._file is None:
                self._open()
        except OSError as error:
            return error
        assert self._file is not None
        return self._file.add(b"".join(self._waiting))

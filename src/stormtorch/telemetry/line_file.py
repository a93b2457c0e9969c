"""Appending to a line file without partial lines, even if the disk is full."""

import contextlib
import os
from pathlib import Path


class LineFile:
    """Appends whole lines. A failed write leaves no partial line behind.

    Args:
        path: The file to append to.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file = self.path.open("ab", buffering=0)

    def add(self, lines: bytes) -> OSError | None:
        """Writes one or more lines, which include their newlines. Returns the error if that fails."""
        end: int | None = None
        try:
            end = os.fstat(self._file.fileno()).st_size
            if self._file.write(lines) != len(lines):
                raise OSError("the disk is full: only a part of the line was written")
        except OSError as error:
            if end is not None:
                with contextlib.suppress(OSError):  # a device cannot be truncated
                    self._file.truncate(end)
            return error
        return None

    def close(self) -> None:
        """Closes the file."""
        with contextlib.suppress(OSError):
            self._file.close()

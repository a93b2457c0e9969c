"""A file that gets whole lines, as long as the disk has room."""

import contextlib
import os
from pathlib import Path


class LineFile:
    """Appends whole lines. A line that cannot be written leaves no part behind.

    Args:
        path: The file to append to.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file = self.path.open("ab", buffering=0)

    def add(self, lines: bytes) -> OSError | None:
        """Writes one or more lines, with their ends. Returns the error if that fails."""
        end: int | None = None
        try:
            end = os.fstat(self._file.fileno()).st_size
            if self._file.write(lines) != len(lines):
                raise OSError("there was room for only a part of the row")
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

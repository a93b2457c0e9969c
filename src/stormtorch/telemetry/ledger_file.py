"""File that follows a ledger: one line per row, with warnings if the disk is full."""

import logging
from pathlib import Path

from stormtorch.telemetry.line_file import LineFile

_log = logging.getLogger("stormtorch")


class LedgerFile:
    """Appends whole lines. A failed write raises no error: it logs a warning and leaves no partial line behind.

    Args:
        path: The file to append to.
        whose: Prefix of the warnings, which names the rank.
        kept: Number of rows that the ledger keeps in memory.
    """

    def __init__(self, path: str | Path, whose: str, kept: int) -> None:
        self._path, self._whose, self._kept = path, whose, kept
        self._file = LineFile(path)
        self._lost = 0
        self._first_lost = self._last_lost = 0

    def add(self, line: str, step: int) -> None:
        """Writes the line of a step. Warns about the first failure, and once writing works again."""
        error = self._file.add(line.encode())
        if error is not None:
            if not self._lost:
                self._first_lost = step
                _log.warning(
                    "%scannot write to %s, which follows the ledger: %s. Rows from step %d on are lost there until "
                    "writing works again; the ledger keeps the latest %d for ledger.write(), and training continues",
                    *(self._whose, self._path, error, step, self._kept),
                )
            self._lost, self._last_lost = self._lost + 1, step
            return
        if self._lost:
            _log.warning(
                "%s%s, which follows the ledger, is writable again; it lacks %d rows, those of steps %d to %d",
                *(self._whose, self._path, self._lost, self._first_lost, self._last_lost),
            )
            self._lost = 0

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

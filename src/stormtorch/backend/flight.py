"""Flight record: the last operations of a group, written to a file when one of them fails."""

import json
import logging
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from stormtorch.collectives import Group
from stormtorch.errors import StormError

DIRECTORY_VARIABLE = "STORM_FLIGHT_DIR"
"""Environment variable with the folder for flight records; by default the one for temporary files."""
_LENGTH = 256
_logger = logging.getLogger(__name__)


class Flight:
    """Ring of the last operations: when each one started, and the error if it failed."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._records: deque[dict[str, Any]] = deque(maxlen=_LENGTH)
        self._dumped = False

    def begin(self, what: str, sequence: int, tensors: Sequence[torch.Tensor]) -> Callable[[BaseException], None]:
        """Records an operation. Returns a function to call if the operation fails."""
        record = {
            "sequence": sequence,
            "operation": what,
            "bytes": sum(each.numel() * each.element_size() for each in tensors),
            "started": time.time(),
        }
        self._records.append(record)

        def failed(error: BaseException) -> None:
            record["error"] = str(error)
            record["ended"] = time.time()
            self._dump(error)

        return failed

    def records(self) -> list[dict[str, Any]]:
        """Returns the last operations, oldest first."""
        return list(self._records)

    def _dump(self, error: BaseException) -> None:
        if self._dumped or not isinstance(error, StormError):
            return
        self._dumped = True
        folder = Path(os.environ.get(DIRECTORY_VARIABLE, tempfile.gettempdir()))
        path = folder / f"storm-flight-{self._group.name}-rank{self._group.rank}-{os.getpid()}.json"
        content = {
            "group": self._group.name,
            "rank": self._group.rank,
            "ranks": list(self._group.ranks),
            "error": str(error),
            "operations": self.records(),
        }
        try:
            path.write_text(json.dumps(content, indent=1), encoding="utf-8")
        except OSError as problem:
            _logger.warning("could not write the flight record to %s: %s", path, problem)
        else:
            _logger.error("%s The last operations are in %s", error, path)

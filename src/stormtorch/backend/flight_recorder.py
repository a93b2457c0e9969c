"""Flight recorder: writes the last operations of a group to a file when one of them fails.

`stormtorch postmortem` compares the files of all ranks. With STORM_FLIGHT_DIR, a rank writes one after any error, so
that the file of the rank that caused the failure is seldom missing.
"""

import json
import logging
import os
import re
import socket
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from stormtorch.collectives import Group
from stormtorch.errors import StormError
from stormtorch.telemetry.folders import FLIGHTS, FLIGHTS_VARIABLE, flights_folder, write_new

VERSION = 3
"""Version of the file's layout."""
_LENGTH = 256
_MOST_SHAPES = 8
_PAIRS = ("send", "recv")
_logger = logging.getLogger(__name__)


class FlightRecorder:
    """Ring of the last operations: when each one started and ended, and the error if it failed."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._records: deque[dict[str, Any]] = deque(maxlen=_LENGTH)
        self._collectives = 0
        self._dumped = False
        on_close: list[Callable[[str], object]] | None = getattr(group.transport, "on_close", None)
        if on_close is not None:
            found = weakref.WeakMethod(self._closing)
            on_close.append(lambda why: (closing := found()) is not None and closing(why))

    def begin(
        self,
        what: str,
        sequence: int,
        results: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor] | None = None,
        peer: int | None = None,
    ) -> Callable[[BaseException | None], None]:
        """Records an operation. Returns a function to call at its end, with the error or None.

        Args:
            what: Name of the operation.
            sequence: Number of the operation in its group, from 1.
            results: Tensors that hold the results.
            inputs: Input tensors; None if they are the results.
            peer: The other rank of a send or a receive, in the group.
        """
        given = results if inputs is None else inputs
        record: dict[str, Any] = {
            "sequence": sequence,
            "operation": what,
            "shapes": [list(each.shape) for each in given[:_MOST_SHAPES]],
            "result_shapes": [list(each.shape) for each in results[:_MOST_SHAPES]],
            "dtype": str(results[0].dtype if results else given[0].dtype if given else "").removeprefix("torch."),
            "bytes": sum(each.numel() * each.element_size() for each in results),
            "started": time.time(),
        }
        if what in _PAIRS:
            # Only collectives have the same number on all ranks: sends and receives differ.
            record["peer"] = peer
        else:
            self._collectives += 1
            record["collective"] = self._collectives
        self._records.append(record)

        def ended(error: BaseException | None) -> None:
            record["ended"] = time.time()
            if error is not None:
                record["error"] = str(error)
                if isinstance(error, StormError):
                    self._dump(str(error))

        return ended

    def records(self) -> list[dict[str, Any]]:
        """Returns the last operations, oldest first."""
        return list(self._records)

    def _closing(self, why: str) -> None:
        """Called before the transport is closed: writes the record if the rank ends with an error of its own."""
        if why not in ("done", "left") and self._records and FLIGHTS_VARIABLE in os.environ:
            self._dump(why)

    def _dump(self, error: str) -> None:
        if self._dumped:
            return
        self._dumped = True
        name = re.sub(r"[^\w.-]", "_", self._group.name)
        file = f"storm-flight-{name}-rank{self._group.rank}-{os.getpid()}.json"
        content = {
            "version": VERSION,
            "job": self._group.transport.job,
            "group": self._group.name,
            "rank": self._group.rank,
            "ranks": list(self._group.ranks),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "time": time.time(),
            "collectives": self._collectives,
            "error": error,
            "operations": self.records(),
        }
        try:
            path = write_new(_folder(), file, json.dumps(content, indent=1))
        except OSError as problem:
            _logger.warning("could not write the flight record %s: %s", file, problem)
        else:
            _logger.error(
                "%s The last operations are in %s; `stormtorch postmortem %s` compares those of all ranks",
                *(error, path, path.parent),
            )


def _folder() -> Path:
    try:
        return flights_folder()
    except PermissionError:  # another user has a folder of that name
        return Path(tempfile.mkdtemp(prefix=f"{FLIGHTS}-"))

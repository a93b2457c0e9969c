"""Watcher: polls a source of records and serves the job's state to several readers."""

import json
import threading
import time
from typing import Any

from stormtorch.telemetry.records import ProcessId, Record
from stormtorch.watch.fields import time_of
from stormtorch.watch.job import Job
from stormtorch.watch.prometheus import JobMetrics
from stormtorch.watch.snapshot_json import snapshot
from stormtorch.watch.sources import Source

# The age of a file at its first read is that of the file system, unless its records are older by more than clocks
# usually differ: then the file was copied.
_COPIED_S = 600.0
# A long run is read in parts, so that the first ones are shown soon.
_LONGEST_READ_S = 10.0


class Watcher:
    """Reads a source into a job and returns its state. Thread-safe, except that only one thread may call `read`.

    Args:
        source: Source of the records.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self._begin()
        self._lock = threading.Lock()
        # Offset to a unix time that does not jump when the system clock is set.
        self._ahead_s = time.time() - time.monotonic()
        self._cached: tuple[tuple[int, int, int, float | None], bytes] | None = None

    def _begin(self) -> None:
        self.job, self._metrics, self._read = Job(), JobMetrics(), self.source.job

    def read(self) -> bool:
        """Adds new records; returns whether there were any."""
        any_new = False
        until = time.monotonic() + _LONGEST_READ_S
        while found := self.source.read():  # may take seconds: the lock is not held
            any_new = True
            with self._lock:
                if self._read not in (None, self.source.job):
                    self._begin()  # another run in the same folder
                self._read = self.source.job
                for who, records in found.items():
                    self._add(who, records)
                self._metrics.take(found)
            if not self.source.in_parts or time.monotonic() > until:
                break
        return any_new

    def _add(self, who: ProcessId, records: list[Record]) -> None:
        """Adds records of one process. The last one arrived now; the process's clock dates the others before it."""
        now = self._now()
        times = [time_of(record, now) for record in records]
        last = max((each for each in times if each is not None), default=now)
        age_s = self.source.age_s(who)
        arrived = now if age_s is None else min(now - age_s, last if now - last > _COPIED_S else now)
        for record, written in zip(records, times, strict=True):
            self.job.add(who.file_name, record, arrived if written is None else arrived - (last - written))

    def _now(self) -> float:
        return time.monotonic() + self._ahead_s

    def snapshot(self, since: int = 0, width_s: float | None = None) -> dict[str, Any]:
        """Returns the state as plain data."""
        with self._lock:
            return snapshot(self.job, self._now(), self.source.name, since=since, width_s=width_s)

    def as_json(self, since: int = 0, width_s: float | None = None) -> bytes:
        """Returns the state as JSON. Identical requests within a second share one answer."""
        key = (self.job.records, int(time.time()), since, width_s)
        cached = self._cached
        if cached is None or cached[0] != key:
            data = json.dumps(self.snapshot(since, width_s), separators=(",", ":"), allow_nan=False)
            self._cached = cached = (key, data.encode())
        return cached[1]

    def metrics(self) -> str:
        """Returns the metrics of all ranks in the text format of Prometheus."""
        with self._lock:
            return self._metrics.text()

    def close(self) -> None:
        """Closes the source."""
        self.source.close()

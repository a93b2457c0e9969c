"""A job that is read again and again, for several readers."""

import json
import threading
import time
from typing import Any

from stormtorch.watch.job import Job
from stormtorch.watch.prometheus import JobMetrics
from stormtorch.watch.snapshot import snapshot
from stormtorch.watch.sources import Source

# A long run is read in parts; whoever watches sees the first ones soon, and the rest with the next calls.
_LONGEST_READ_S = 10.0


class Watcher:
    """Reads a source into a job, and says what state it is in. Any thread may call it, one of them `read`.

    Args:
        source: Where records come from.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.job = Job()
        self._metrics = JobMetrics()
        self._lock = threading.Lock()
        self._cached: tuple[tuple[int, int, int, float | None], bytes] | None = None

    def read(self) -> bool:
        """Adds what is new; returns whether there was anything."""
        any_new = False
        until = time.monotonic() + _LONGEST_READ_S
        while found := self.source.read():  # may take seconds: nobody else waits meanwhile
            any_new = True
            with self._lock:
                for who, records in found.items():
                    for record in records:
                        self.job.add(who.file_name, record)
                self._metrics.take(found)
            if not self.source.in_parts or time.monotonic() > until:
                break
        return any_new

    def snapshot(self, since: int = 0, width_s: float | None = None) -> dict[str, Any]:
        """Returns the state as plain data."""
        with self._lock:
            return snapshot(self.job, time.time(), self.source.name, since=since, width_s=width_s)

    def as_json(self, since: int = 0, width_s: float | None = None) -> bytes:
        """Returns the state as JSON. Readers who ask for the same within a second share one answer."""
        key = (self.job.records, int(time.time()), since, width_s)
        cached = self._cached
        if cached is None or cached[0] != key:
            data = json.dumps(self.snapshot(since, width_s), separators=(",", ":"), allow_nan=False)
            self._cached = cached = (key, data.encode())
        return cached[1]

    def metrics(self) -> str:
        """Returns the latest numbers of all ranks as Prometheus reads them."""
        with self._lock:
            return self._metrics.text()

    def close(self) -> None:
        """Closes the source."""
        self.source.close()

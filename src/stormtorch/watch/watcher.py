"""A job that is read again and again, for several readers."""

import json
import threading
import time
from typing import Any

from stormtorch.watch.job import Job
from stormtorch.watch.prometheus import JobMetrics
from stormtorch.watch.snapshot import snapshot
from stormtorch.watch.sources import Source


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
        found = self.source.read()  # may take seconds: nobody else waits meanwhile
        with self._lock:
            for who, records in found.items():
                for record in records:
                    self.job.add(who.file_name, record)
            self._metrics.take(found)
        return bool(found)

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

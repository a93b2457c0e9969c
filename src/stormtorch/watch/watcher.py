"""A job that is read again and again, for several readers."""

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

# A file that is read for the first time is as old as the file system says, unless its records say that it is older by
# more than clocks usually differ: then somebody has copied it.
_COPIED_S = 600.0
# A long run is read in parts; whoever watches sees the first ones soon, and the rest with the next calls.
_LONGEST_READ_S = 10.0


class Watcher:
    """Reads a source into a job, and says what state it is in. Any thread may call it, one of them `read`.

    Args:
        source: Where records come from.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self._begin()
        self._lock = threading.Lock()
        # Unix time that nobody sets back or forth while this watches.
        self._ahead_s = time.time() - time.monotonic()
        self._cached: tuple[tuple[int, int, int, float | None], bytes] | None = None

    def _begin(self) -> None:
        self.job, self._metrics, self._read = Job(), JobMetrics(), self.source.job

    def read(self) -> bool:
        """Adds what is new; returns whether there was anything."""
        any_new = False
        until = time.monotonic() + _LONGEST_READ_S
        while found := self.source.read():  # may take seconds: nobody else waits meanwhile
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
        """Adds records of one process. The last came just now; its own clock says how long before that the others."""
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

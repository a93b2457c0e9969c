"""Prometheus text format: metrics of a whole job, from the records of all its ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from stormtorch.telemetry.metrics import METRICS, RankMetrics
from stormtorch.telemetry.records import ProcessId, Record

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of the text, for the HTTP header."""


class JobMetrics:
    """Metrics of all ranks of a job. If a rank has had several processes, the latest one counts."""

    def __init__(self) -> None:
        self._processes: dict[ProcessId, RankMetrics] = {}

    def take(self, records: Mapping[ProcessId, Iterable[Record]]) -> None:
        """Adds new records, as `Folder.read` and `LiveJob.read` return them."""
        for who, those in records.items():
            metrics = self._processes.setdefault(who, RankMetrics())
            for record in those:
                metrics.take(record)

    def text(self) -> str:
        """Returns all metrics in the text format of Prometheus."""
        ranks: dict[int, tuple[tuple[float, int], RankMetrics]] = {}
        for who, metrics in self._processes.items():
            age = (metrics.time, who.incarnation)
            if who.rank not in ranks or age > ranks[who.rank][0]:
                ranks[who.rank] = age, metrics
        lines: list[str] = []
        for metric in METRICS:
            samples = [
                _sample(metric.name, {"rank": str(rank), **labels}, value)
                for rank, (_, metrics) in sorted(ranks.items())
                for labels, value in metric.read(metrics)
            ]
            if samples:
                lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}", *samples]
        return "".join(f"{line}\n" for line in lines)


def exposition(records: Mapping[ProcessId, Iterable[Record]]) -> str:
    """Returns the metrics of a job, given all its records."""
    metrics = JobMetrics()
    metrics.take(records)
    return metrics.text()


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    inside = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
    return f"{name}{{{inside}}} {value!r}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

"""Prometheus metrics endpoint of one rank, served by its own process: STORM_METRICS=[host:]port."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from stormtorch.telemetry.metrics import METRICS, RankMetrics
from stormtorch.telemetry.records import Record

_log = logging.getLogger("stormtorch")

VARIABLE = "STORM_METRICS"
"""Environment variable with the address at which a rank serves its metrics: a port, or host:port."""


_servers: weakref.WeakSet[MetricsServer] = weakref.WeakSet()


class MetricsServer:
    """Serves the metrics of a rank at /metrics, until it is closed.

    Args:
        text: A port, for this machine alone, or host:port. LOCAL_RANK is added to the port, so that the ranks of one
            machine use consecutive ports. Port 0 lets the kernel choose.
        rank: Rank of this process.

    Raises:
        ValueError: prometheus_client is not installed, or the address cannot be bound.
    """

    def __init__(self, text: str, rank: int) -> None:
        host, port = _address(text)
        try:
            client: Any = import_module("prometheus_client")
        except ImportError as error:
            raise ValueError(
                f"{VARIABLE}={text} needs the package prometheus_client: pip install prometheus_client"
            ) from error
        self._metrics, self._lock, self._rank = RankMetrics(), threading.Lock(), rank
        registry = client.CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = client.start_http_server(port, host, registry)
        except OSError as error:
            raise ValueError(
                f"rank {rank}: cannot serve metrics at {host}:{port}: {error.strerror}; choose another port by "
                f"{VARIABLE}"
            ) from error
        _servers.add(self)
        self.address = f"{host}:{self._server.server_port}"
        _log.info("rank %d: serves metrics at http://%s/metrics", rank, self.address)

    def take(self, record: Record) -> None:
        """Updates the metrics from a record."""
        with self._lock:
            self._metrics.take(record)

    def collect(self) -> Iterator[Any]:
        """Yields all metrics as prometheus_client families."""
        core: Any = import_module("prometheus_client.core")
        kinds = {"counter": core.CounterMetricFamily, "gauge": core.GaugeMetricFamily}
        with self._lock:
            read = [(metric, list(metric.read(self._metrics))) for metric in METRICS]
        for metric, samples in read:
            if samples:
                names = ["rank", *samples[0][0]]
                family = kinds[metric.kind](metric.name, metric.help, labels=names)
                for labels, value in samples:
                    family.add_metric([str(self._rank), *labels.values()], value)
                yield family

    def release_port(self) -> None:
        """Closes the socket in a forked process that has inherited it."""
        self._server.socket.close()

    def close(self) -> None:
        """Stops serving."""
        _servers.discard(self)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(1.0)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 0xFFFF:
        raise ValueError(f"{VARIABLE} must be a port or host:port, got {text!r}")
    local = os.environ.get("LOCAL_RANK", "")
    number = int(port) + (int(local) if local.isdecimal() and int(port) else 0)
    if number > 0xFFFF:
        raise ValueError(f"{VARIABLE}={text} leaves no port for LOCAL_RANK {local}: choose a lower one")
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", number


def _close_in_child() -> None:
    """Closes inherited sockets in a forked process, which would occupy the port and never answer."""
    for server in list(_servers):
        server.release_port()
        _servers.discard(server)


os.register_at_fork(after_in_child=_close_in_child)

"""Export of flight records in the format of torch's backends, for `torch.distributed.flight_recorder`."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stormtorch.telemetry.postmortem import FlightRecord, Operation

PREFIX = "storm_rank_"
"""Prefix of the file names; the rank follows."""
# torch's analyser accepts files of this version, with operations of backends that it knows.
_VERSION = "2.10"
_BACKEND = "gloo"
_NAMES = {"lossy_all_reduce": "all_reduce", "lossy_reduce_scatter": "reduce_scatter"}


def write_for_torch(flights: Sequence[FlightRecord], folder: Path) -> list[Path]:
    """Writes a folder per group with a file per rank. Sends and receives are omitted.

    Returns:
        The folders: `python -m torch.distributed.flight_recorder.fr_trace FOLDER --prefix storm_rank_` reads one.
    """
    folders: dict[str, Path] = {}
    for flight in flights:
        # Group names are untrusted: a folder must not lie outside `folder`.
        name = "".join(letter if letter.isalnum() else "-" for letter in flight.group)[:80] or "group"
        inside = folders.setdefault(flight.group, folder / f"{len(folders)}-{name}")
        inside.mkdir(parents=True, exist_ok=True)
        (inside / f"{PREFIX}{flight.rank}").write_bytes(pickle.dumps(_dump(flight)))
    return list(folders.values())


def _dump(flight: FlightRecord) -> dict[str, Any]:
    return {
        "version": _VERSION,
        "pg_config": {flight.group: {"name": flight.group, "desc": "storm", "ranks": str(flight.ranks)}},
        "pg_status": {},
        "entries": [_entry(number, each, flight) for number, each in sorted(flight.collectives.items())],
    }


def _entry(number: int, operation: Operation, flight: FlightRecord) -> dict[str, Any]:
    size, name = len(flight.ranks), _NAMES.get(operation.name, operation.name)
    given, results = operation.given, operation.results
    # A list with one tensor per rank counts as one concatenated tensor.
    if name == "all_gather" and len(results) > 1 and given:
        results = [[size * math.prod(given[0])]]
    if name == "reduce_scatter" and len(given) > 1 and results:
        given = [[size * math.prod(results[0])]]
    if name == "barrier":
        given = results = [[1]]
    dtypes = [operation.dtype or "uint8"]
    ended = operation.ended is not None and not operation.error
    return {
        "record_id": number,
        "pg_id": 0,
        "process_group": (flight.group, "storm"),
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": f"{_BACKEND}:{name}",
        "time_created_ns": round(1e9 * operation.started),
        "time_discovered_started_ns": round(1e9 * operation.started),
        "time_discovered_completed_ns": round(1e9 * operation.ended) if ended and operation.ended else None,
        "duration_ms": 1e3 * (operation.ended - operation.started) if ended and operation.ended else None,
        "input_sizes": given,
        "input_dtypes": dtypes,
        "output_sizes": results,
        "output_dtypes": dtypes,
        "state": "completed" if ended else "started",
        "retired": ended,
        "is_p2p": False,
        "timeout_ms": 0,
        "frames": [],
    }

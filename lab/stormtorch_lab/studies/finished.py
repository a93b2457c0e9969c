"""Results of finished trainings in a checkpoint folder, so that a repeated command skips them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from stormtorch.checks import BadSetting
from stormtorch.telemetry.ledger import Ledger
from stormtorch.telemetry.line_file import LineFile
from stormtorch_lab.simulation.checkpoints import replacing
from stormtorch_lab.simulation.processes import Processes
from stormtorch_lab.studies.results import SimResult

_log = logging.getLogger("stormtorch")

# Settings that may change between runs: the requested trainings, and how fast they are computed.
_FREE = ("policies", "policy_settings", "seeds", "first_seed", "how", "at_once", "fuse")


class Finished:
    """Results by policy and seed. Only the first process reads and writes; it broadcasts to the others.

    If the disk is full, results are not written, with a warning; trainings go on.

    Args:
        folder: Folder of the results; None stores nothing.
        ledger: File for the lines of all trainings, in their order; None writes none.
        together: Processes that simulate together.
        asked: Settings that all trainings share, as plain data: those of the folder must be the same.

    Raises:
        BadSetting: The folder belongs to other settings, or cannot be read.
    """

    def __init__(
        self, folder: Path | None, ledger: Path | None, together: Processes, requested: dict[str, Any]
    ) -> None:
        self._folder, self._ledger, self._together = folder, ledger, together
        self._first = together.rank == 0
        problem = together.broadcast_first(None if folder is None or not self._first else _compare(folder, requested))
        if problem is not None:
            raise BadSetting("checkpoint", problem)
        # Not before the check above: a wrong folder must not overwrite an earlier file.
        if ledger is not None and self._first:
            ledger.write_text("")

    def find(self, key: str) -> SimResult | None:
        """Reads the result of an earlier run, if there is one."""
        if self._folder is None:
            return None
        found, problem = None, None
        path = self._folder / f"{key}.json"
        if self._first and path.exists():
            try:
                kept = json.loads(path.read_text(encoding="utf-8"))
                found = SimResult.from_json(kept["result"])
                if self._ledger is not None and kept["ledger"] is None:
                    problem = f"holds {path.name} without its steps: --ledger must be given from the first run on"
                else:
                    self._write(found, kept["ledger"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                problem = f"holds {path.name}, which cannot be read: {error}"
        found, problem = self._together.broadcast_first((found, problem))
        if problem is not None:
            raise BadSetting("checkpoint", problem)
        return found

    def keep(self, key: str, result: SimResult, ledger: Ledger) -> None:
        """Writes a new result; a full disk causes a warning."""
        if not self._first:
            return
        # Large with many workers, so only on request.
        rows = None if self._ledger is None else ledger.to_json()
        self._write(result, rows)
        if self._folder is None:
            return
        path = self._folder / f"{key}.json"
        try:
            with replacing(path) as beside:
                beside.write_text(json.dumps({"result": result.to_json(), "ledger": rows}), encoding="utf-8")
        except OSError as error:
            _log.warning(
                "cannot write %s: %s; repeating the command will compute it again", path, error.strerror or error
            )

    def _write(self, result: SimResult, rows: list[dict[str, Any]] | None) -> None:
        if self._ledger is not None and rows is not None:
            whose = {"policy": result.policy, "seed": result.seed}
            file = LineFile(self._ledger)
            error = file.add("".join(json.dumps(whose | row) + "\n" for row in rows).encode())
            file.close()
            if error is not None:
                _log.warning(
                    "cannot write to %s: %s; it lacks all rows of %s, seed %d",
                    *(self._ledger, error, result.policy, result.seed),
                )


def _compare(folder: Path, requested: dict[str, Any]) -> str | None:
    """Returns the problem of a folder, if any; stores the settings in a new one."""
    plain = json.loads(json.dumps({name: value for name, value in requested.items() if name not in _FREE}))
    path = folder / "settings.json"
    try:
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with replacing(path) as beside:
                beside.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
            return None
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"cannot be used: {path}: {error}"
    for name in sorted(known.keys() | plain.keys()):
        if known.get(name) != plain.get(name):
            return (
                f"{folder} belongs to other settings: its {name} is {known.get(name)!r}, not {plain.get(name)!r}; "
                "name another folder, or remove it"
            )
    return None

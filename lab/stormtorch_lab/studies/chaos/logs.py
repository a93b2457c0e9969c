"""Logs of a chaos run: lines of JSON written by each process, and the history of the run read from them.

Every line has a time, `t`, on the clock that all hosts of a lab share, and one of these:

{"begin": 812, "host": 2, "rank": 2}                               the process has joined, at this step
{"step": 813, "view": 7, "members": [0, 1, 2], "since": 800, "loss": 2.4}
{"digest": "0f3a...", "step": 820}                                 of the exact parameters
{"refused": "...", "step": 820}                                    why exact parameters were refused
{"warning": "..."}
{"left": 900}                                                      it has left after SIGTERM, at this step
{"end": 1200, "val_loss": 1.9, "digest": "77ab...", "scale": 1024.0, "shards": {"2": [815, 77, 3, 8], "1": [4, ...]}}
        the end: its loss scale, and fingerprints by owner of its own shard and of its standby shard: values and
        state of one model after the other
{"error": "..."}
"""

import bisect
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple


class Step(NamedTuple):
    """A step that a rank has completed."""

    t: float
    host: int
    rank: int
    step: int
    """Steps so far, including this one."""
    view: int | None
    """Number of the view in which it was made; None if views have no numbers."""
    members: tuple[int, ...]
    """Ranks of that view."""
    since: int | None = None
    """Steps at which the view began."""


@dataclass
class ProcessLog:
    """Log of one process."""

    host: int
    number: int
    """Number of the process on its host, from 0."""
    rank: int | None = None
    """Rank of the process; None until it has joined."""
    joined_s: float | None = None
    """Time at which it joined."""
    steps: list[Step] = field(default_factory=list)
    losses: list[tuple[int, float]] = field(default_factory=list)
    """Step and training loss."""
    digests: dict[int, str] = field(default_factory=dict)
    """Digest of the exact parameters, by step."""
    refused: list[tuple[int, str]] = field(default_factory=list)
    """Steps at which exact parameters were refused, and why."""
    warnings: list[tuple[float, str]] = field(default_factory=list)
    left: bool = False
    """True once the process has left the job after a SIGTERM."""
    ended_at: int | None = None
    """Last step of the training, if it reached that."""
    val_loss: float | None = None
    scale: float | None = None
    """Loss scale at the end."""
    shards: dict[int, list[int]] = field(default_factory=dict)
    """Fingerprints at the end, by owner, of its own shard and its standby shard."""
    error: str | None = None
    """Error that ended the process."""

    @property
    def name(self) -> str:
        """Name for messages: host and number of the process."""
        return f"h{self.host}" + (f" (process {self.number + 1})" if self.number else "")

    @property
    def longest_pause_s(self) -> float:
        """Longest time between two steps."""
        return max((after.t - before.t for before, after in itertools.pairwise(self.steps)), default=0.0)

    def add(self, line: dict[str, Any]) -> None:
        """Applies one line of the log."""
        t = float(line["t"])
        if "begin" in line:
            self.rank, self.joined_s = line["rank"], t
        elif "digest" in line and "end" not in line:
            self.digests[line["step"]] = line["digest"]
        elif "refused" in line:
            self.refused.append((line["step"], line["refused"]))
        elif "step" in line:
            assert self.rank is not None, "a process joins before it makes a step"
            view, members, since = line.get("view"), tuple(line["members"]), line.get("since")
            self.steps.append(Step(t, self.host, self.rank, line["step"], view, members, since))
            self.losses.append((line["step"], line["loss"]))
        elif "warning" in line:
            self.warnings.append((t, line["warning"]))
        elif "left" in line:
            self.left = True
        elif "error" in line:
            self.error = line["error"]
        elif "end" in line:
            self.ended_at, self.val_loss = line["end"], line["val_loss"]
            self.digests[line["end"]], self.scale = line["digest"], line.get("scale")
            self.shards = {int(owner): each for owner, each in line.get("shards", {}).items()}


@dataclass(frozen=True)
class History:
    """All processes of a run."""

    process_logs: Sequence[ProcessLog]

    @cached_property
    def steps(self) -> list[Step]:
        """Steps of all ranks in order of time."""
        return sorted(step for process_log in self.process_logs for step in process_log.steps)

    @cached_property
    def frontier(self) -> list[tuple[float, int]]:
        """Times at which any rank reached a step for the first time, and that step."""
        found: list[tuple[float, int]] = []
        for step in self.steps:
            if not found or step.step > found[-1][1]:
                found.append((step.t, step.step))
        return found

    def of_host(self, host: int) -> list[ProcessLog]:
        """Processes of one host in order."""
        return sorted(
            (process_log for process_log in self.process_logs if process_log.host == host),
            key=lambda process_log: process_log.number,
        )

    def stepped(self, host: int, after_s: float) -> float | None:
        """Time of a host's first step after a given time; None if it made none."""
        for process_log in self.of_host(host):
            index = bisect.bisect_right(process_log.steps, after_s, key=lambda step: step.t)
            if index < len(process_log.steps):
                return process_log.steps[index].t
        return None

    @property
    def completed(self) -> bool:
        """Whether any process reached the end of the training."""
        return any(process_log.ended_at is not None for process_log in self.process_logs)

    @property
    def last_step(self) -> int:
        """Highest step of any rank."""
        return max((process_log.steps[-1].step for process_log in self.process_logs if process_log.steps), default=0)


def log_path(folder: Path, host: int, number: int) -> Path:
    """File of one process."""
    return folder / f"h{host}.{number}.jsonl"


class Reader:
    """Reads logs while they grow.

    Args:
        folder: Folder of the logs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process_logs: dict[Path, ProcessLog] = {}
        self._read: dict[Path, int] = {}

    def read(self) -> History:
        """Reads new lines, and returns the history so far."""
        for path in self._folder.glob("h*.jsonl"):
            if path not in self._process_logs:
                host, number = path.name.removesuffix(".jsonl")[1:].split(".")
                self._process_logs[path] = ProcessLog(int(host), int(number))
            for line in self._lines(path):
                self._process_logs[path].add(line)
        return History(
            sorted(self._process_logs.values(), key=lambda process_log: (process_log.host, process_log.number))
        )

    def _lines(self, path: Path) -> Iterable[dict[str, Any]]:
        with path.open("rb") as file:
            file.seek(self._read.get(path, 0))
            text = file.read()
        # A killed process may leave half a line; a running one may still write the other half.
        whole = text[: text.rfind(b"\n") + 1]
        self._read[path] = self._read.get(path, 0) + len(whole)
        return (json.loads(line) for line in whole.splitlines())

"""History of each rank, read from ledgers (`ledger.follow`) or step records (`STORM_RECORD`) into one form."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stormtorch.telemetry.record_files import read_run
from stormtorch.telemetry.records import MOST_LINE_BYTES, Record, checked
from stormtorch.telemetry.statistics import mean
from stormtorch.telemetry.text import share_text, time_text

COLUMNS = (
    "step",
    "steps",
    "seconds",
    "gradient_wait_s",
    "broadcast_wait_s",
    "view_wait_s",
    "bytes_sent",
    "arrived",
    "loss",
    "lead",
    "pair_drift",
    "owner_drift",
    "pair_bound",
    "effective_batch",
    "variance_inflation",
    "fetched",
    "guarded",
    "train_loss",
)
"""Columns of a table of all entries."""
# A link on which at least this fraction arrived is not worth naming.
_FINE = 0.999


@dataclass(slots=True)
class RankHistory:
    """History of one rank."""

    name: str
    """"rank 3", or the name of a ledger's file, which does not know its rank."""
    rank: int | None
    entries: list[Record] = field(default_factory=list)
    """Records of kind "steps". A row of a ledger becomes one of a single step (of several under model averaging),
    without wall time."""
    events: list[str] = field(default_factory=list)
    links: dict[str, Record] = field(default_factory=dict)
    """Latest measurements of each link; empty for a ledger."""
    ended: str = ""
    """How the process ended; empty if unknown."""

    def total(self, name: str) -> float:
        """Sum of a number over all entries that have it."""
        return sum(entry.get(name) or 0 for entry in self.entries)

    @property
    def steps(self) -> int:
        """Number of steps."""
        return int(self.total("steps"))

    @property
    def waited_s(self) -> float:
        """Seconds of waiting for others."""
        return self.total("gradient_wait_s") + self.total("broadcast_wait_s")

    @property
    def seconds(self) -> float | None:
        """Wall time of all steps; None in a ledger."""
        return self.total("seconds") if any(entry["seconds"] for entry in self.entries) else None

    @property
    def arrived(self) -> float:
        """Mean fraction that arrived, over all steps."""
        return float(sum(each.get("arrived", 1.0) * each["steps"] for each in self.entries) / max(self.steps, 1))

    def arrived_from(self) -> dict[str, float]:
        """Mean fraction that arrived from each peer, over all steps and both stages."""
        sums: dict[str, list[tuple[float, int]]] = {}
        for entry in self.entries:
            for stage in ("gradients", "broadcast"):
                for peer, fraction in entry.get(stage, {}).items():
                    sums.setdefault(peer, []).append((fraction, entry["steps"]))
        return {
            peer: sum(fraction * steps for fraction, steps in each) / sum(steps for _, steps in each)
            for peer, each in sorted(sums.items(), key=lambda item: int(item[0]))
        }

    def latest(self, name: str) -> float | None:
        """The last value of an optional number."""
        return next((each[name] for each in reversed(self.entries) if each.get(name) is not None), None)


@dataclass(frozen=True, slots=True)
class LinkHistory:
    """One direction between two ranks, as its receiver measured it."""

    source: str
    target: str
    arrived: float
    loss: float | None
    """Recent loss of datagrams; None in a ledger."""
    rtt_s: float | None


def read_histories(paths: Sequence[Path]) -> list[RankHistory]:
    """Reads ledgers, record files and folders of runs.

    Several processes of one rank have one history. Malformed lines are skipped.

    Raises:
        ValueError: A file is missing, or holds neither rows nor records; the message names it.
    """
    histories: dict[str, RankHistory] = {}
    for path in paths:
        for name, found in (_of_run(path) if _is_run(path) else {str(path): _of_ledger(path)}).items():
            known = histories.setdefault(name, RankHistory(name, found.rank))
            known.entries += found.entries
            known.events += found.events
            known.links |= found.links
            known.ended = found.ended
    if not any(history.entries for history in histories.values()):
        raise ValueError(f"{', '.join(map(str, paths))}: no step was complete")
    return [history for history in histories.values() if history.entries]


def _is_run(path: Path) -> bool:
    if path.is_dir():
        return True
    try:
        with path.open("rb") as file:
            first = file.readline(MOST_LINE_BYTES)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    return b'"kind"' in first


def _of_run(path: Path) -> dict[str, RankHistory]:
    histories: dict[str, RankHistory] = {}
    for who, records in read_run(path).items():
        history = histories.setdefault(f"rank {who.rank}", RankHistory(f"rank {who.rank}", who.rank))
        history.ended = ""
        for record in records:
            if record["kind"] == "steps":
                history.entries.append(record)
            elif record["kind"] == "links":
                history.links |= record["links"]
            elif record["kind"] == "event":
                history.events.append(record["text"])
            elif record["kind"] == "end":
                history.ended = record["why"]
    return histories


def _of_ledger(path: Path) -> RankHistory:
    history, before = RankHistory(str(path), None), -1
    with path.open("rb") as file:
        while line := file.readline(MOST_LINE_BYTES):
            row = _row(line)
            if row is None:
                continue
            step = row["step"]
            row["steps"] = step - before if 0 <= before < step else 1
            before = step
            history.entries.append(row)
            events = json.loads(line).get("events", [])
            history.events += [each[:300] for each in events if isinstance(each, str)]
    if not history.entries:
        raise ValueError(f"{path} contains neither ledger rows nor step records")
    return history


def _row(line: bytes) -> Record | None:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    alike = {"kind": "steps", "time": 0.0, "steps": 1, "seconds": 0.0, "guarded": int(bool(row.get("guarded")))}
    return checked({**row, **alike})


def all_links(histories: Sequence[RankHistory]) -> list[LinkHistory]:
    """Returns all links of the histories, those that lost most first."""
    found = []
    for history in histories:
        for peer, arrived in history.arrived_from().items():
            seen = history.links.get(peer, {})
            found.append(LinkHistory(f"rank {peer}", history.name, arrived, seen.get("loss"), seen.get("rtt_s")))
    return sorted(found, key=lambda link: (link.arrived, -(link.rtt_s or 0.0)))


def one_sentence(histories: Sequence[RankHistory]) -> str:
    """Summarises in one sentence what arrived, what waiting cost, and which link is the worst."""
    steps = max(history.steps for history in histories)
    who = histories[0].name if len(histories) == 1 else f"{len(histories)} ranks"
    waited = time_text(mean([history.waited_s / max(history.steps, 1) for history in histories]))
    arrived = share_text(mean([history.arrived for history in histories]))
    timed = [history for history in histories if history.seconds]
    if timed:
        share = sum(history.waited_s for history in timed) / sum(history.seconds or 0.0 for history in timed)
        cost = f"waiting for others took {100 * share:.0f} % of the time ({waited} a step)"
    else:
        cost = f"waiting for others took {waited} a step"
    words = [f"{who} made {steps:,} step{'s' * (steps != 1)}: {arrived} of the chunks arrived, {cost}"]
    links = all_links(histories)
    if links and links[0].arrived < _FINE:
        worst = links[0]
        words.append(
            f"the worst link is from {worst.source} to {worst.target}, where {share_text(worst.arrived)} arrived"
        )
    elif links:
        words.append("no link lost more than one chunk in a thousand")
    failed = [each for each in histories if each.ended not in ("", "done", "left")]
    if failed:
        words.append(f"{failed[0].name} ended with {failed[0].ended}")
    return "; ".join(words).rstrip(".") + "."


def summary(history: RankHistory) -> dict[str, Any]:
    """Returns the main numbers of a history, ready for JSON."""
    return {
        "name": history.name,
        "rank": history.rank,
        "steps": history.steps,
        "seconds": history.seconds,
        "arrived": history.arrived,
        **{
            name: history.total(name)
            for name in ("gradient_wait_s", "broadcast_wait_s", "view_wait_s", "bytes_sent", "fetched", "guarded")
        },
        **{name: history.latest(name) for name in ("pair_drift", "pair_bound", "train_loss")},
        "arrived_from": history.arrived_from(),
        "events": history.events,
        "ended": history.ended,
    }

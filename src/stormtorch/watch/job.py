"""A job: the merged records of all its processes, its views and its timeline."""

from collections import OrderedDict
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from stormtorch.watch.fields import clean, count, number, ranks, text, time_of
from stormtorch.watch.process import Process
from stormtorch.watch.series import Series

# Limits on the processes (each restart is another one) and on the entries of the timeline.
_MOST_PROCESSES = 4096
_MOST_NOTES = 500


@dataclass(slots=True)
class TimelineEvent:
    """Entry of the timeline. The same event of several ranks is one entry."""

    time: float
    kind: str
    """One of "start", "view", "event" and "end"."""
    step: int | None
    text: str
    ranks: set[int]


@dataclass(frozen=True, slots=True)
class ViewChange:
    """A view: an agreed list of members."""

    number: int
    time: float
    arrived: float
    """Arrival time of its first record, by the watcher's clock."""
    step: int | None
    members: tuple[int, ...]
    left: tuple[int, ...]
    joined: tuple[int, ...]


@dataclass
class Job:
    """All processes of a job. `add` takes their records in any order; `JobSnapshot` evaluates them."""

    processes: dict[str, Process] = field(default_factory=dict)
    series: Series = field(default_factory=Series)
    views: "OrderedDict[int, ViewChange]" = field(default_factory=OrderedDict)
    timeline: "OrderedDict[tuple[Any, ...], TimelineEvent]" = field(default_factory=OrderedDict)
    arrived: float = 0.0
    """Time at which the last record of any rank arrived, by the watcher's clock."""
    records: int = 0

    def add(self, origin: str, record: dict[str, Any], arrived: float | None = None) -> None:
        """Adds one record of a process; malformed ones are ignored.

        Args:
            origin: Name of the process.
            record: The record.
            arrived: When it arrived, by the watcher's clock; None takes the record's own time.
        """
        time = time_of(record, arrived)
        kind = record.get("kind")
        if not isinstance(kind, str):
            return
        if time is None:
            self._leave_out(origin, record, arrived)
            return
        arrived = time if arrived is None else arrived
        process = self.processes.get(origin)
        if process is None:
            if len(self.processes) >= _MOST_PROCESSES:
                return
            process = self.processes[origin] = Process(origin)
        process.told, process.arrived = max(process.told, time), max(process.arrived, arrived)
        self.arrived = max(self.arrived, arrived)
        self.records += 1
        if kind != "end" and process.why is not None and time > process.ended:
            process.begin_again()
        if kind == "rank":
            process.apply_rank_record(record)
            if process.incarnation:
                where = f" on {process.host}" if process.host else ""
                self._add_event(
                    time, "start", count(record, "step"), f"Joined{where}, incarnation {process.incarnation}", process
                )
        elif kind == "steps":
            self._on_steps(process, time, record)
        elif kind == "links":
            process.apply_links_record(time, record)
            losses = [link.loss for link in process.links.values() if link.loss is not None]
            trips = [link.rtt_s for link in process.links.values() if link.rtt_s is not None]
            values = {
                "link_loss": sum(losses) / len(losses) if losses else None,
                "worst_loss": max(losses, default=None),
                "rtt": median(trips) if trips else None,
                "cores": process.cores,
            }
            self.series.add(time, values)
        elif kind == "view":
            self._on_view(process, time, arrived, record)
        elif kind == "event":
            self._add_event(time, "event", count(record, "step"), text(record, "text"), process)
        elif kind == "end":
            process.why, process.ended = text(record, "why") or "done", time
            ended = {"done": "Done", "left": "Transferred its shard and left"}.get(
                process.why, f"Failed: {process.why}"
            )
            self._add_event(time, "end", count(record, "step"), ended, process)

    def _leave_out(self, origin: str, record: dict[str, Any], arrived: float | None) -> None:
        """Adds an event, once per rank, that its records with implausible times are skipped."""
        when = self.arrived if arrived is None else arrived
        process = self.processes.get(origin)
        if process is None or process.rank is None or number(record, "time") is None or not when:
            return
        words = f"Rank {process.rank} has an implausible clock: records with such times are skipped"
        self._keep(("clock", process.rank), TimelineEvent(when, "event", None, words, {process.rank}))

    def _on_steps(self, process: Process, time: float, record: dict[str, Any]) -> None:
        totals = process.apply_steps_record(time, record)
        if not totals.steps:
            return
        latest = process.latest
        values = {
            "step": totals.seconds / totals.steps,
            "wait": totals.wait_s / totals.steps,
            "compute": totals.compute_s / totals.steps,
            "lost": totals.lost,
            "sent": totals.bytes_sent / totals.seconds if totals.seconds else None,
            "drift": latest.get("pair_drift"),
            "bound": latest.get("pair_bound"),
            "batch": latest.get("effective_batch"),
            "train_loss": latest.get("train_loss") if record.get("train_loss") is not None else None,
        }
        self.series.add(time, values)

    def _on_view(self, process: Process, time: float, arrived: float, record: dict[str, Any]) -> None:
        number = count(record, "number")
        if number is None:
            return
        members, left, joined = (tuple(ranks(record, each)) for each in ("members", "left", "came"))
        if number not in self.views:
            self.views[number] = ViewChange(number, time, arrived, count(record, "step"), members, left, joined)
            while len(self.views) > _MOST_NOTES:
                self.views.popitem(last=False)
        changes = [f"without {named(left)}"] * bool(left) + [f"with {named(joined)}"] * bool(joined)
        words = f"View {number}: {', '.join([named(members), *changes])}"
        # All members report a view, each at its step; a new member does not know which ranks joined or left.
        event = self._keep(("view", number), TimelineEvent(time, "view", count(record, "step"), words, set()))
        if changes:
            event.text = words

    def _add_event(self, time: float, kind: str, step: int | None, words: str, process: Process) -> None:
        event = self._keep((kind, step, words), TimelineEvent(time, kind, step, clean(words), set()))
        if process.rank is not None:
            event.ranks.add(process.rank)

    def _keep(self, key: tuple[Any, ...], new: TimelineEvent) -> TimelineEvent:
        event = self.timeline.setdefault(key, new)
        while len(self.timeline) > _MOST_NOTES:
            self.timeline.popitem(last=False)
        return event

    # --- members --------------------------------------------------------------------------------------------------

    @property
    def current(self) -> dict[int, Process]:
        """The latest process of each rank, by rank."""
        found: dict[int, Process] = {}
        for process in self.processes.values():
            if process.rank is None:
                continue
            other = found.get(process.rank)
            if other is None or _age(process) >= _age(other):
                found[process.rank] = process
        return dict(sorted(found.items()))

    @property
    def view(self) -> ViewChange | None:
        """The latest view that any rank reported."""
        return self.views[max(self.views)] if self.views else None


def named(members: tuple[int, ...] | list[int]) -> str:
    """Names ranks, with ranges abbreviated: "ranks 0 to 3, 7"."""
    if not members:
        return "no rank"
    runs: list[list[int]] = []
    for rank in sorted(members):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' * (len(members) > 1)} {', '.join(parts)}"


def _age(process: Process) -> tuple[float, float]:
    # Start time first: in a folder of several runs, an earlier run may have higher incarnations.
    return process.started or process.told, process.incarnation

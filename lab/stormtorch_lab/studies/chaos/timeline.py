"""Timeline of a chaos run: faults, pauses of the training, and the time until affected hosts took part again."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stormtorch_lab.studies.chaos.faults import Fault
from stormtorch_lab.studies.chaos.logs import History

# A pause that begins within this many seconds after the end of a fault belongs to it.
_AFTER_S = 5.0


@dataclass(frozen=True)
class InjectedFault:
    """An injected fault with its real times, on the clock of the logs."""

    fault: Fault
    began_s: float
    ended_s: float


@dataclass(frozen=True)
class ProcessExit:
    """The exit of a process that no fault caused."""

    host: int
    at_s: float
    status: int
    error: str | None = None


@dataclass(frozen=True)
class Recovery:
    """Recovery from one fault."""

    struck: InjectedFault
    pause_s: float | None
    """Longest time without a step on any host; after an outage, from its end. None if no step followed."""
    return_s: float | None
    """Time from the end of the fault until all affected hosts made steps again; for a join, from its start. None if
    another fault, or the end, came first, or if no host was affected."""

    def to_json(self, start_s: float) -> dict[str, Any]:
        """Plain data, in seconds since the run began."""
        times = {"began_s": self.struck.began_s - start_s, "ended_s": self.struck.ended_s - start_s}
        found = self.struck.fault.to_json() | times | {"pause_s": self.pause_s, "return_s": self.return_s}
        return {key: round(value, 3) if isinstance(value, float) else value for key, value in found.items()}


def recoveries(history: History, all_struck: Sequence[InjectedFault]) -> list[Recovery]:
    """One recovery for each fault, in order."""
    return [
        Recovery(struck, pause_of(history, struck, all_struck), return_of(history, struck, all_struck))
        for struck in all_struck
    ]


def pause_of(history: History, struck: InjectedFault, all_struck: Sequence[InjectedFault]) -> float | None:
    """Longest pause of the training due to a fault."""
    times = [t for t, _ in history.frontier]
    if struck.fault.kind == "outage":
        after = bisect.bisect_right(times, struck.ended_s)
        return times[after] - struck.ended_s if after < len(times) else None
    until = struck.ended_s + _AFTER_S
    until = min([until, *(each.began_s for each in _outages(all_struck) if each.began_s > struck.began_s)])
    longest = 0.0
    for index in range(max(bisect.bisect_right(times, struck.began_s) - 1, 0), len(times)):
        if times[index] >= until:
            return longest
        if index + 1 == len(times):
            return longest if history.completed else None
        # A pause prolonged by an outage belongs to the outage.
        if not any(times[index] < each.ended_s and each.began_s < times[index + 1] for each in _outages(all_struck)):
            longest = max(longest, times[index + 1] - times[index])
    return None


def return_of(history: History, struck: InjectedFault, all_struck: Sequence[InjectedFault]) -> float | None:
    """Time until all affected hosts made steps again; None if another fault affected one of them first."""
    since = struck.began_s if struck.fault.kind == "join" else struck.ended_s
    found = []
    for host in struck.fault.hosts:
        stepped = history.stepped(host, since)
        if stepped is None or stepped > undisturbed_until(host, since, all_struck):
            return None
        found.append(stepped - since)
    return max(found, default=None)


def undisturbed_until(host: int, since_s: float, all_struck: Sequence[InjectedFault]) -> float:
    """Time of the next fault of a host or of all hosts; `since_s` if one is still active, infinite without any."""
    disturbing = (
        max(each.began_s, since_s)
        for each in all_struck
        if each.ended_s > since_s and (host in each.fault.hosts or each.fault.kind in ("outage", "storm"))
        if not (each.fault.kind == "join" and each.began_s <= since_s)
    )
    return min(disturbing, default=float("inf"))


def _outages(all_struck: Sequence[InjectedFault]) -> list[InjectedFault]:
    return [each for each in all_struck if each.fault.kind == "outage"]

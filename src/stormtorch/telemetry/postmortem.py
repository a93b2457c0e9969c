"""Analysis of flight records: the first collective in which ranks differ, and ranks without a record."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stormtorch.telemetry.text import size_text

_MOST_BYTES = 16 << 20
_MOST_OPERATIONS = 4096
# Collectives in which all ranks must have tensors of the same size.
_SAME_SIZE = ("all_reduce", "lossy_all_reduce", "reduce", "broadcast", "reduce_scatter", "lossy_reduce_scatter")


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of one rank."""

    sequence: int
    name: str
    collective: int | None
    """Number of the collective in its group, from 1; None for sends and receives."""
    given: list[list[int]]
    """Shapes of the input tensors; of a long list, the first ones."""
    results: list[list[int]]
    """Shapes of the output tensors."""
    dtype: str
    size_bytes: int
    started: float
    ended: float | None
    error: str

    @property
    def shapes(self) -> str:
        """Shapes of the input tensors as text: "1000, 2x3"."""
        return ", ".join("x".join(map(str, shape)) or "scalar" for shape in self.given)

    @property
    def text(self) -> str:
        """Short description: "all_reduce of 4 MB"."""
        return f"{self.name} of {size_text(self.size_bytes)}" if self.size_bytes else self.name

    @property
    def state(self) -> str:
        """State of the operation: failed, under way or done."""
        return "failed" if self.error else "under way" if self.ended is None else "done"

    def agrees(self, other: Operation) -> bool:
        """Whether both may be the same collective on two ranks."""
        if self.name != other.name:
            return False
        return self.name not in _SAME_SIZE or (self.size_bytes, self.dtype) == (other.size_bytes, other.dtype)


@dataclass(slots=True)
class FlightRecord:
    """Flight record of one rank in one group."""

    path: Path
    job: str
    """Id of the run."""
    group: str
    rank: int
    ranks: list[int]
    """All ranks of the group."""
    time: float
    error: str
    collectives: dict[int, Operation] = field(default_factory=dict)
    pairs: list[Operation] = field(default_factory=list)

    @property
    def last(self) -> int:
        """Number of the last collective that the rank began."""
        return max(self.collectives, default=0)


@dataclass(frozen=True, slots=True)
class GroupFailure:
    """Analysis of one failed process group."""

    group: str
    sentence: str
    flights: list[FlightRecord]
    silent: list[int]
    """Ranks without a flight record."""
    number: int | None
    """Number of the collective in which ranks differ, or of the last one if they agree."""
    culprits: list[int]
    """Ranks that differ from the majority, or are behind."""


def read_flight_records(paths: Sequence[Path]) -> list[FlightRecord]:
    """Reads flight records from files and folders.

    Raises:
        ValueError: A file is missing or is not a flight record; the message names it.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(path.glob("storm-flight-*.json"))
            if not inside:
                raise ValueError(f"{path} holds no flight records (storm-flight-*.json)")
            files += inside
        else:
            files.append(path)
    return [_flight(path) for path in dict.fromkeys(files)]


def _flight(path: Path) -> FlightRecord:
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    try:
        if len(text) > _MOST_BYTES:
            raise ValueError("too long")
        parsed: Any = json.loads(text)
        ranks = [_whole(each) for each in parsed["ranks"]]
        position, operations = _whole(parsed["rank"]), list(parsed["operations"])[-_MOST_OPERATIONS:]
        flight = FlightRecord(
            path,
            _text(parsed.get("job", ""))[:80],
            _text(parsed["group"]),
            ranks[position],
            ranks,
            0.0,
            _text(parsed["error"]),
        )
        found = [_operation(each) for each in operations]
        flight.time = _number(parsed.get("time", found[-1].started if found else 0.0))
    except (ValueError, TypeError, KeyError, IndexError, RecursionError, AttributeError) as error:
        raise ValueError(f"{path} is not a flight record of this version of stormtorch") from error
    for operation in found:
        if operation.collective is None:
            flight.pairs.append(operation)
        else:
            flight.collectives[operation.collective] = operation
    return flight


def _operation(parsed: dict[str, Any]) -> Operation:
    ended, number = parsed.get("ended"), parsed.get("collective")
    return Operation(
        sequence=_whole(parsed["sequence"]),
        name=_text(parsed["operation"])[:60],
        collective=None if number is None else _whole(number),
        given=_shapes(parsed.get("shapes", [])),
        results=_shapes(parsed.get("result_shapes", [])),
        dtype=_text(parsed.get("dtype", ""))[:20],
        size_bytes=_whole(parsed["bytes"]),
        started=_number(parsed["started"]),
        ended=None if ended is None else _number(ended),
        error=_text(parsed.get("error", "")),
    )


def _shapes(value: list[list[object]]) -> list[list[int]]:
    return [[_whole(size) for size in shape] for shape in value]


def _whole(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError("no whole number")
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("no number")
    return float(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("no text")
    return "".join(letter if letter.isprintable() else " " for letter in value[:2000])


# --- analysis --------------------------------------------------------------------------------------------------------


def find(flights: Sequence[FlightRecord]) -> list[GroupFailure]:
    """Analyses each group; the group that failed first comes first."""
    groups: dict[tuple[str, str], list[FlightRecord]] = {}
    for flight in flights:
        groups.setdefault((flight.job, flight.group), []).append(flight)
    ordered = sorted(groups.items(), key=lambda item: min(flight.time for flight in item[1]))
    return [_of_group(name, sorted(those, key=lambda each: each.rank)) for (_, name), those in ordered]


def _of_group(group: str, flights: list[FlightRecord]) -> GroupFailure:
    everyone = sorted({rank for flight in flights for rank in flight.ranks})
    silent = [rank for rank in everyone if rank not in {flight.rank for flight in flights}]
    # Records keep the latest operations: compare from the first collective that all of them still contain.
    firsts = [min(flight.collectives) for flight in flights if flight.collectives]
    for number in range(max(firsts, default=1), max((flight.last for flight in flights), default=0) + 1):
        did = {flight.rank: flight.collectives.get(number) for flight in flights}
        sentence, culprits = _difference(number, did, group)
        if culprits:
            return GroupFailure(group, sentence + _missing(silent, " In addition, "), flights, silent, number, culprits)
    number = max((flight.last for flight in flights), default=0)
    at = next((flight.collectives[number] for flight in flights if number in flight.collectives), None)
    where = "before any collective" if at is None else f"at collective {number}, {at.text}"
    if silent:
        agree = (
            f" The others agree: all failed {where}."
            if len(flights) > 1
            else f" Rank {flights[0].rank} failed {where}."
        )
        return GroupFailure(group, _missing(silent, "") + agree, flights, silent, number, silent)
    why = Counter(flight.error for flight in flights).most_common(1)[0][0]
    first = min(flights, key=lambda flight: flight.time)
    words = f"All {len(flights)} ranks of group {group} did the same collectives and failed {where}; rank {first.rank} "
    return GroupFailure(group, f"{words}was the first: {why}", flights, silent, number, [first.rank])


def _difference(number: int, did: dict[int, Operation | None], group: str) -> tuple[str, list[int]]:
    """Returns how ranks differ in one collective, and which ranks do; none if they agree."""
    begun = {rank: operation for rank, operation in did.items() if operation is not None}
    if not begun:
        return "", []
    where = f"at collective {number} of group {group}"
    # The largest set of ranks that agree counts as right; with ties, the one of the lowest rank.
    sets: list[list[int]] = []
    for rank, operation in begun.items():
        same = next((each for each in sets if begun[each[0]].agrees(operation)), None)
        if same is None:
            sets.append([rank])
        else:
            same.append(rank)
    most = max(sets, key=len)
    others = [rank for rank in begun if rank not in most]
    if others:
        usual, strange = begun[most[0]], begun[others[0]]
        what = (
            f"called {strange.name} where {_named(most)} called {usual.name}"
            if strange.name != usual.name
            else f"passed {_given(strange)} to {strange.name} where {_named(most)} passed {_given(usual)}"
        )
        same_strange = [rank for rank in others if begun[rank].agrees(strange)]
        return f"{_named(same_strange, capital=True)} {what}, {where}.", others
    behind = [rank for rank, operation in did.items() if operation is None]
    if behind:
        them = "it has" if len(behind) == 1 else "they have"
        waited = f"{begun[most[0]].text}, in which {_named(most)} waited"
        return (
            f"{_named(behind, capital=True)} never began collective {number} of group {group}, {waited}: {them} taken "
            "another branch of the program, or failed earlier."
        ), behind
    return "", []


def _given(operation: Operation) -> str:
    return f"{operation.dtype} [{operation.shapes}], {size_text(operation.size_bytes)}"


def _missing(silent: list[int], before: str) -> str:
    if not silent:
        return ""
    one = len(silent) == 1
    return (
        f"{before}{_named(silent, capital=not before)} wrote no record: "
        f"{'it was' if one else 'they were'} killed, {'hangs' if one else 'hang'}, or "
        f"{'its file is' if one else 'their files are'} missing here."
    )


def _named(ranks: Sequence[int], *, capital: bool = False) -> str:
    shown = ", ".join(map(str, ranks[:6])) + (f" and {len(ranks) - 6} more" if len(ranks) > 6 else "")
    return f"{'R' if capital else 'r'}ank{'s' * (len(ranks) > 1)} {shown}"

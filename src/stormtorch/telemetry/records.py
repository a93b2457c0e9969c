"""Schema of step records: what a rank reports while it trains, one JSON object per line.

A folder of a run holds one file per process, `rank-<rank>-<incarnation>-<pid>.jsonl`, which begins with a `RankRecord`.
Readers trust nothing: a partial last line waits for its rest, and truncated, hostile or unknown lines are skipped. What
`parse` returns has only the fields below, with values of these types.

Ranks are those of the transport, as text where they are keys of JSON objects. Times are in seconds, `time` since 1970.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict

VERSION = 2
"""Number of this schema."""
KINDS = ("rank", "steps", "links", "view", "event", "end")
MOST_LINE_BYTES = 1 << 20
"""Longest line that readers accept: some records of 256 ranks have 60 KB."""
_MOST_TEXT = 2000
_MOST_KEYS = 4096
_LARGEST = 1e18


class RankRecord(TypedDict, total=False):
    """Identity of a process: its first record, repeated whenever another model is prepared in it."""

    kind: Literal["rank"]
    time: float
    n: int
    version: int
    rank: int
    world: int
    """Number of ranks at the start of the job."""
    incarnation: int
    """Number of the process within its rank: 0 is the first."""
    host: str
    pid: int
    job: str
    """Id of the run: the same on all its ranks, also on those that rejoin or join later."""
    group: str
    """Name of the group of all ranks."""
    address: str
    """host:port at which this process serves `stormtorch watch`; empty if it does not."""
    policy: str
    """Class of the policy."""
    settings: dict[str, Any]
    """Fields of the policy, as plain values."""
    transport: dict[str, Any]
    """Settings of the transport: silence_s, timeout_s, datagram_bytes, sealed, rate."""
    parameters: int
    """Number of elements of all parameters that are trained together."""
    chunk_bytes: int
    stormtorch: str
    torch: str
    python: str
    started: float
    """When `prepare` was called."""


class StepsRecord(TypedDict, total=False):
    """The steps since the last such record. Numbers are sums over these steps unless stated otherwise."""

    kind: Literal["steps"]
    time: float
    n: int
    step: int
    """Last complete step, counted from 0."""
    steps: int
    seconds: float
    """Wall time of these steps, from the end of the last one before them."""
    gradient_wait_s: float
    broadcast_wait_s: float
    view_wait_s: float
    """Seconds spent on changes of the view. Under an `OwnerPolicy`, `gradient_wait_s` contains them."""
    bytes_sent: int
    arrived: float
    """Mean fraction that arrived, over these steps and all links."""
    gradients: dict[str, float]
    """Mean fraction that arrived of each peer's gradients."""
    broadcast: dict[str, float]
    """Mean fraction that arrived of each owner's parameters."""
    lag: dict[str, int]
    """Chunks of others' parameters by their age in steps, after the last step."""
    lead: float
    """Updates by which this rank's broadcast led, in the last step."""
    loss: float
    """Fraction of this rank's broadcast that its receivers lost, smoothed, after the last step."""
    pair_drift: float | None
    """Mean over these steps, like the next three."""
    owner_drift: float | None
    update_variance: float | None
    pair_bound: float | None
    effective_batch: float
    variance_inflation: float
    fetched: int
    guarded: int
    """Number of these steps that the convergence guard made exact."""
    missing: list[int]
    """Ranks that were absent in the last step."""
    train_loss: float | None
    """The latest training loss that the program reported by `optimizer.session.note(loss=...)`."""


class PathState(TypedDict, total=False):
    """One of several paths to a peer: a pair of interfaces, in the order of `Options(interfaces=...)`."""

    up: bool
    """False while it is silent although another path is not."""
    rtt_s: float
    loss: float
    rate: float
    bytes_sent: int
    bytes_received: int
    outages: int
    """How often it went down."""


class PeerLinkRecord(TypedDict, total=False):
    """One peer as this rank sees it."""

    rtt_s: float
    """Round trip; 0 while unknown."""
    loss: float
    """Recent fraction of the peer's datagrams to this rank that were lost."""
    rate: float
    """Bytes per second at which this rank sends to the peer; 0 if unlimited."""
    path_bytes: int
    """Largest datagram that the path to the peer carries."""
    heard_s: float
    """Seconds since the last datagram of the peer; absent while the endpoint does not receive."""
    paths: dict[str, PathState]
    """The paths to the peer, by number from 0; absent if there is one."""


class Waits(TypedDict, total=False):
    """A wait in progress."""

    call: str
    """The user's call in which the rank waits: "backward()"."""
    seconds: float
    peers: list[int]
    """Participants of the exchange; the late ranks are among them."""


class LinksRecord(TypedDict, total=False):
    """The network as this rank sees it. Written also while no step completes."""

    kind: Literal["links"]
    time: float
    n: int
    step: int
    """Number of the step in progress."""
    links: dict[str, PeerLinkRecord]
    health: dict[str, float]
    """Nonzero counters of the engine since the process began; those of injected faults as "faults_lost"."""
    cpu_s: float
    """Processor seconds of this process so far, over all threads."""
    quorum: bool
    """Whether this rank reaches a majority of the ranks."""
    waits: Waits | None


class ViewRecord(TypedDict, total=False):
    """A new view has begun on this rank."""

    kind: Literal["view"]
    time: float
    n: int
    number: int
    step: int
    members: list[int]
    left: list[int]
    came: list[int]


class EventRecord(TypedDict, total=False):
    """An event as text."""

    kind: Literal["event"]
    time: float
    n: int
    step: int
    text: str


class EndRecord(TypedDict, total=False):
    """The last record of a process, if it had time to write one."""

    kind: Literal["end"]
    time: float
    n: int
    step: int
    why: str
    """"done", "left", or the text of the error."""


Record = dict[str, Any]
"""Any of the records above, after `parse`."""


class ProcessId(NamedTuple):
    """One process of a job."""

    rank: int
    incarnation: int
    pid: int

    @property
    def file_name(self) -> str:
        """Name of its file in the folder of a run."""
        return f"rank-{self.rank}-{self.incarnation}-{self.pid}.jsonl"


_NAME = re.compile(r"rank-(\d{1,9})-(\d{1,9})-(\d{1,9})\.jsonl")


def process_of_file(path: Path) -> ProcessId | None:
    """Returns the process that a file of a run belongs to; None for other files."""
    found = _NAME.fullmatch(path.name)
    return None if found is None else ProcessId(*map(int, found.groups()))


# --- lines ---------------------------------------------------------------------------------------------------------


def line_of(record: Record) -> str:
    """Returns a record as a line without newline. inf and NaN, which JSON lacks, become null."""
    return _encode(_rounded(record))


def parse(line: str | bytes) -> Record | None:
    """Parses an untrusted line; returns its record, or None if it is malformed."""
    if len(line) > MOST_LINE_BYTES:
        return None
    try:
        return checked(json.loads(line))
    except (ValueError, RecursionError):
        return None


def checked(parsed: object) -> Record | None:
    """Returns the valid fields of an untrusted record; None if its kind, time or a required field is invalid."""
    if not isinstance(parsed, dict) or parsed.get("kind") not in KINDS:
        return None
    kind = str(parsed["kind"])
    record: Record = {"kind": kind}
    for name, read in {**_COMMON, **_FIELDS[kind]}.items():
        if name in parsed:
            try:
                record[name] = read(parsed[name])
            except (ValueError, TypeError, OverflowError, RecursionError):
                continue
    needed = ("time", *_NEEDED[kind])
    return record if all(record.get(name) is not None for name in needed) else None


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("no number")
    if abs(value) > _LARGEST:
        raise ValueError("a number that is too large")
    return value


def _at_least_0(value: object) -> float:
    number = _number(value)
    if number < 0:
        raise ValueError("a negative number")
    return number


def _whole(value: object) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise ValueError("no whole number")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("no text")
    return "".join(
        letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}"
        for letter in value[:_MOST_TEXT]
    )


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("neither true nor false")
    return value


def _ranks(value: object) -> list[int]:
    if not isinstance(value, list) or len(value) > _MOST_KEYS:
        raise ValueError("no list of ranks")
    return [_whole(each) for each in value]


def _maybe(read: Callable[[object], Any]) -> Callable[[object], Any]:
    return lambda value: None if value is None else read(value)


def _by_number(read: Callable[[object], Any]) -> Callable[[object], dict[str, Any]]:
    """Reads an object whose keys are ranks or other whole numbers."""

    def by_number(value: object) -> dict[str, Any]:
        if not isinstance(value, dict) or len(value) > _MOST_KEYS:
            raise ValueError("no object")
        return {str(int(key)): read(each) for key, each in value.items() if key.isdecimal() and len(key) <= 9}

    return by_number


def _fields(readers: dict[str, Callable[[object], Any]]) -> Callable[[object], dict[str, Any]]:
    """Reads an object with known keys; drops invalid values."""

    def fields(value: object) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise ValueError("no object")
        found = {}
        for name, read in readers.items():
            try:
                found[name] = read(value[name])
            except (KeyError, ValueError, TypeError, OverflowError):
                continue
        return found

    return fields


def _counters(value: object) -> dict[str, float]:
    if not isinstance(value, dict) or len(value) > _MOST_KEYS:
        raise ValueError("no object")
    return {_text(key)[:80]: _number(each) for key, each in value.items()}


def _plain(value: object, depth: int = 4) -> Any:
    """Reads settings: any JSON of limited depth."""
    if isinstance(value, dict) and depth and len(value) <= _MOST_KEYS:
        return {_text(key)[:80]: _plain(each, depth - 1) for key, each in value.items()}
    if isinstance(value, list) and depth and len(value) <= _MOST_KEYS:
        return [_plain(each, depth - 1) for each in value]
    if value is None or isinstance(value, bool):
        return value
    return _text(value) if isinstance(value, str) else _number(value)


def _settings(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("no object")
    settings: dict[str, Any] = _plain(value)
    return settings


_COMMON: dict[str, Callable[[object], Any]] = {"time": _number, "n": _whole}
_NEEDED = {
    "rank": ("rank",),
    "steps": ("step", "steps", "seconds"),
    "links": ("links",),
    "view": ("number", "members"),
    "event": ("text",),
    "end": ("why",),
}
_WAITS: dict[str, Callable[[object], Any]] = {"call": _text, "seconds": _at_least_0, "peers": _ranks}
_PATH: dict[str, Callable[[object], Any]] = {
    "up": _flag,
    **dict.fromkeys(("rtt_s", "loss", "rate"), _at_least_0),
    **dict.fromkeys(("bytes_sent", "bytes_received", "outages"), _whole),
}
_LINK: dict[str, Callable[[object], Any]] = {
    "rtt_s": _at_least_0,
    "loss": _at_least_0,
    "rate": _at_least_0,
    "path_bytes": _whole,
    "heard_s": _at_least_0,
    "paths": _by_number(_fields(_PATH)),
}
_FIELDS: dict[str, dict[str, Callable[[object], Any]]] = {
    "rank": {
        **dict.fromkeys(("version", "rank", "world", "incarnation", "pid", "parameters", "chunk_bytes"), _whole),
        **dict.fromkeys(("host", "job", "group", "address", "policy", "stormtorch", "torch", "python"), _text),
        "settings": _settings,
        "transport": _settings,
        "started": _number,
    },
    "steps": {
        **dict.fromkeys(("step", "steps", "bytes_sent", "fetched", "guarded"), _whole),
        **dict.fromkeys(("seconds", "gradient_wait_s", "broadcast_wait_s", "view_wait_s", "arrived"), _at_least_0),
        **dict.fromkeys(("lead", "loss", "effective_batch", "variance_inflation"), _number),
        **dict.fromkeys(("pair_drift", "owner_drift", "update_variance", "pair_bound", "train_loss"), _maybe(_number)),
        "gradients": _by_number(_at_least_0),
        "broadcast": _by_number(_at_least_0),
        "lag": _by_number(_whole),
        "missing": _ranks,
    },
    "links": {
        "step": _whole,
        "links": _by_number(_fields(_LINK)),
        "health": _counters,
        "cpu_s": _at_least_0,
        "quorum": _flag,
        "waits": _maybe(_fields(_WAITS)),
    },
    "view": {"number": _whole, "step": _whole, "members": _ranks, "left": _ranks, "came": _ranks},
    "event": {"step": _whole, "text": _text},
    "end": {"step": _whole, "why": _text},
}


def _rounded(value: Any) -> Any:
    """Rounds numbers to seven digits and times to milliseconds, which halves the length of lines."""
    kind = type(value)
    if kind is float:
        return float(f"{value:.7g}") if math.isfinite(value) else None
    if kind is dict:
        return {key: round(each, 3) if key in ("time", "started") else _rounded(each) for key, each in value.items()}
    if kind is list or kind is tuple:
        return [each if type(each) is int else _rounded(each) for each in value]
    return value


_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode

"""Conditions that differ from link to link and from host to host, read from a file.

{"links": [{"from": 0, "to": 1, "loss": 0.2, "burst": 8},
           {"from": 2, "to": "*", "delay": "80ms"},
           {"from": "*", "to": 3, "trace": {"file": "links.jsonl", "line": 7}}],
 "hosts": [{"host": 3, "up": "10mbit", "down": "50mbit", "queue": "64kb"}]}

A link is a direction: name both where both are meant. Of several entries that fit a link, the last one counts. A
trace's file is looked for beside the file that names it.
"""

import json
from pathlib import Path
from typing import Any

from stormtorch.lab.conditions import BadCondition, Conditions, HostLine, model_of, rate_of, size_of, time_of
from stormtorch.loss import LinkModel, PerLink, Trace

_NAME = "per_link"
_LINK_KEYS = {"from", "to", "loss", "burst", "delay", "trace"}
_HOST_KEYS = {"host", "rate", "up", "down", "queue"}


def read_per_link(path: Path, base: Conditions, hosts: int) -> Conditions:
    """`base` with what the file says on top."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadCondition(_NAME, f"cannot be read: {path}: {error.strerror}") from error
    except ValueError as error:
        raise BadCondition(_NAME, f"must be JSON: {path}: {error}") from error
    if not isinstance(data, dict) or set(data) - {"links", "hosts"}:
        raise BadCondition(_NAME, f'must be an object with "links" and "hosts": {path}')
    if isinstance(base.loss, PerLink):
        models, default = dict(base.loss.links), base.loss.default
    else:
        models, default = {}, base.model(0, 1)
    delays, lines = dict(base.delays), dict(base.lines)
    for number, entry in enumerate(_entries(data, "links", _LINK_KEYS)):
        model = _entry_model(f"links[{number}]", entry, path.parent)
        delay = time_of(f"links[{number}].delay", entry["delay"]) if "delay" in entry else None
        for source in _hosts(f"links[{number}].from", entry.get("from"), hosts):
            for target in _hosts(f"links[{number}].to", entry.get("to"), hosts):
                if source == target:
                    continue
                if model is not None:
                    models[source, target] = model
                if delay is not None:
                    delays[source, target] = delay
    for number, entry in enumerate(_entries(data, "hosts", _HOST_KEYS)):
        line = _entry_line(f"hosts[{number}]", entry)
        for host in _hosts(f"hosts[{number}].host", entry.get("host"), hosts):
            lines[host] = line
    return base.changed(loss=PerLink(default=default, links=models), delays=delays, lines=lines)


def _entries(data: dict[str, Any], key: str, known: set[str]) -> list[dict[str, Any]]:
    entries = data.get(key, [])
    if not isinstance(entries, list):
        raise BadCondition(_NAME, f'must have a list under "{key}"')
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise BadCondition(_NAME, f"{key}[{number}] must be an object")
        if strange := set(entry) - known:
            raise BadCondition(
                _NAME, f"{key}[{number}] has {', '.join(sorted(strange))}; there are {', '.join(sorted(known))}"
            )
    return entries


def _hosts(where: str, value: object, hosts: int) -> range | tuple[int, ...]:
    if value == "*":
        return range(hosts)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < hosts:
        return (value,)
    raise BadCondition(_NAME, f'{where} must be "*" or a host in 0 to {hosts - 1}, got {value!r}')


def _entry_model(where: str, entry: dict[str, Any], folder: Path) -> LinkModel | None:
    try:
        if "trace" in entry:
            if "loss" in entry:
                raise BadCondition(_NAME, "has a loss and a trace; only one can hold")
            trace = entry["trace"]
            if isinstance(trace, str):
                return Trace(bits=trace)
            return Trace.from_file(folder / trace["file"], line=trace.get("line", 0))
        if "loss" in entry:
            return model_of(entry["loss"], entry.get("burst", 1.0))
        if "burst" in entry:
            raise BadCondition(_NAME, "has a burst without a loss")
    except (BadCondition, OSError, KeyError, TypeError, ValueError) as error:
        problem = error.problem if isinstance(error, BadCondition) else str(error)
        raise BadCondition(_NAME, f"{where}: {problem}") from error
    return None


def _entry_line(where: str, entry: dict[str, Any]) -> HostLine:
    both = rate_of(f"{where}.rate", entry["rate"]) if "rate" in entry else None
    return HostLine(
        up_bits=rate_of(f"{where}.up", entry["up"]) if "up" in entry else both,
        down_bits=rate_of(f"{where}.down", entry["down"]) if "down" in entry else both,
        queue_bytes=size_of(f"{where}.queue", entry["queue"]) if "queue" in entry else None,
    )

"""Link files: JSON that describes single links, for the lab, for fault injection and for virtual workers.

{"links": [{"from": 0, "to": 1, "loss": 0.2, "burst": 8},
           {"from": 2, "to": "*", "loss": 0.05, "burst": "5ms"},
           {"from": "*", "to": 3, "trace": {"file": "links.jsonl", "line": 7}}],
 "hosts": [{"host": 1, "loss": 0.1}]}

A link has one direction: name both directions if both are meant. If several entries match a link, the last one applies.
Loss of a host applies to all links from it and to it, unless an entry of a link matches. The path of a trace is
relative to the folder of the file that names it. The lab also reads delays and the rates of hosts; see
`stormtorch_lab.netns.per_link`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from stormtorch.network.checked import checked_chance
from stormtorch.network.loss import Bernoulli, LinkModel, PerLink, Trace, loss_in_bursts

__all__ = ["HOST_KEYS", "LinkEntry", "entries", "link_entries", "ranks_of", "read_file", "read_links"]

HOST_KEYS = {"host", "rate", "up", "down", "queue", "mtu", "loss", "burst"}
"""Fields of an entry under "hosts"."""
_LINK_KEYS = {"from", "to", "loss", "burst", "delay", "trace"}


class LinkEntry(NamedTuple):
    """One entry of the list of links."""

    where: str
    """Name of the entry in error messages."""
    links: list[tuple[int, int]]
    """Links that the entry describes."""
    model: LinkModel | None
    """Loss of these links; None if the entry does not give any."""
    given: dict[str, Any]
    """All fields of the entry."""


def read_links(path: str | PathLike[str], world: int, *, default: LinkModel | None = None) -> PerLink:
    """Read the loss of the links among `world` ranks. Links that are not named follow `default`, or lose nothing.

    Delays and rates of hosts in the file are for the lab and are ignored here. A ValueError names what is wrong.
    """
    models: dict[tuple[int, int], LinkModel] = {}
    for entry in link_entries(read_file(Path(path)), Path(path).parent, world):
        if entry.model is not None:
            models.update(dict.fromkeys(entry.links, entry.model))
    return PerLink(default=default or Bernoulli(p=0.0), links=models)


def read_file(path: Path) -> dict[str, Any]:
    """Read the two lists of a file; their entries are not checked."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot be read: {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"must be JSON: {path}: {error}") from error
    if not isinstance(data, dict) or set(data) - {"links", "hosts"}:
        raise ValueError(f'must be an object with no other keys than "links" and "hosts": {path}')
    return data


def link_entries(data: dict[str, Any], folder: Path, world: int) -> Iterator[LinkEntry]:
    """Read the losses of hosts, then the entries under "links"; files of traces are relative to `folder`."""
    for number, entry in enumerate(entries(data, "hosts", HOST_KEYS)):
        where = f"hosts[{number}]"
        named = ranks_of(f"{where}.host", entry.get("host"), world)
        links = [(one, other) for one in range(world) for other in range(world) if one != other]
        touched = [link for link in links if link[0] in named or link[1] in named]
        yield LinkEntry(where, touched, _model(where, entry, folder), {})
    for number, entry in enumerate(entries(data, "links", _LINK_KEYS)):
        where = f"links[{number}]"
        model = _model(where, entry, folder)
        sources = ranks_of(f"{where}.from", entry.get("from"), world)
        targets = ranks_of(f"{where}.to", entry.get("to"), world)
        links = [(source, target) for source in sources for target in targets if source != target]
        yield LinkEntry(where, links, model, entry)


def entries(data: dict[str, Any], key: str, known: set[str]) -> list[dict[str, Any]]:
    """Entries of the list `key`; a ValueError if one has other fields than `known`."""
    found = data.get(key, [])
    if not isinstance(found, list):
        raise ValueError(f'must have a list under "{key}"')
    for number, entry in enumerate(found):
        if not isinstance(entry, dict):
            raise ValueError(f"{key}[{number}] must be an object")
        if strange := set(entry) - known:
            raise ValueError(
                f"{key}[{number}] has {', '.join(sorted(strange))}; it may have {', '.join(sorted(known))}"
            )
    return found


def ranks_of(where: str, value: object, world: int) -> range | tuple[int, ...]:
    """Rank or host that an entry names, or all of them for "*"."""
    if value == "*":
        return range(world)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < world:
        return (value,)
    raise ValueError(f'{where} must be "*" or one of 0 to {world - 1}, got {value!r}')


def _model(where: str, entry: dict[str, Any], folder: Path) -> LinkModel | None:
    """Loss model of an entry, or None; `where` names the entry in errors."""
    try:
        return _loss_model(entry, folder)
    except KeyError as error:
        raise ValueError(f"{where}: trace must name a {error}") from error
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error


def _loss_model(entry: dict[str, Any], folder: Path) -> LinkModel | None:
    if "trace" in entry:
        if "loss" in entry:
            raise ValueError("has a loss and a trace: give one of them")
        trace = entry["trace"]
        if isinstance(trace, str):
            return Trace(bits=trace)
        return Trace.from_file(folder / trace["file"], line=trace.get("line", 0))
    if "loss" in entry:
        p = checked_chance("loss", entry["loss"])
        return loss_in_bursts(p, entry.get("burst", 1.0), name="loss")
    if "burst" in entry:
        raise ValueError("has a burst without a loss")
    return None

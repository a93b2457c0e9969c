"""Conditions that differ from link to link and from host to host, read from a file.

{"links": [{"from": 0, "to": 1, "loss": 0.2, "burst": 8},
           {"from": 1, "to": 0, "loss": 0.2, "burst": "5ms"},
           {"from": 2, "to": "*", "delay": "80ms"},
           {"from": "*", "to": 3, "trace": {"file": "links.jsonl", "line": 7}}],
 "hosts": [{"host": 3, "up": "10mbit", "down": "50mbit", "queue": "64kb", "mtu": 1200, "loss": 0.1}]}

A link has one direction: name both directions where both are meant. Of several entries for a link, the last counts.
Loss of a host is that of all links from it and to it; entries of links take precedence.
The file of a trace is relative to the folder of the file that names it.
"""

from pathlib import Path
from typing import Any

from stormtorch.checks import BadCondition
from stormtorch.network.link_file import HOST_KEYS, entries, link_entries, ranks_of, read_file
from stormtorch.network.loss import PerLink
from stormtorch_lab.netns.conditions import (
    AccessLink,
    Conditions,
    checked_delay,
    checked_mtu,
    checked_queue,
    checked_rate,
)

_NAME = "per_link"


def read_per_link(path: Path, base: Conditions, hosts: int) -> Conditions:
    """Reads a file and returns `base` with the conditions of the file."""
    if isinstance(base.loss, PerLink):
        models, default = dict(base.loss.links), base.loss.default
    else:
        models, default = {}, base.model(0, 1)
    delays, lines = dict(base.delays), dict(base.lines)
    try:
        data = read_file(path)
        for number, host_entry in enumerate(entries(data, "hosts", HOST_KEYS)):
            line = _entry_access_link(f"hosts[{number}]", host_entry)
            for host in ranks_of(f"hosts[{number}].host", host_entry.get("host"), hosts):
                lines[host] = line
        for entry in link_entries(data, path.parent, hosts):
            if entry.model is not None:
                models.update(dict.fromkeys(entry.links, entry.model))
            if "delay" in entry.given:
                delays.update(dict.fromkeys(entry.links, checked_delay(f"{entry.where}.delay", entry.given["delay"])))
    except BadCondition:
        raise
    except ValueError as error:
        raise BadCondition(_NAME, str(error)) from error
    return base.changed(loss=PerLink(default=default, links=models), delays=delays, lines=lines)


def _entry_access_link(where: str, entry: dict[str, Any]) -> AccessLink:
    both = checked_rate(f"{where}.rate", entry["rate"]) if "rate" in entry else None
    return AccessLink(
        up_bits=checked_rate(f"{where}.up", entry["up"]) if "up" in entry else both,
        down_bits=checked_rate(f"{where}.down", entry["down"]) if "down" in entry else both,
        queue_bytes=checked_queue(f"{where}.queue", entry["queue"]) if "queue" in entry else None,
        mtu=checked_mtu(f"{where}.mtu", entry["mtu"]) if "mtu" in entry else None,
    )

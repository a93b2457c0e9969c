"""Writes the measurements as a file that the lab and the simulator replay (`stormtorch.network.link_file`).

Each direction of a link has its loss, datagram by datagram, as a trace, and its delay. A host has its rate if the
network limited it, and its path MTU if that is smaller than its interface's.
"""

import json
from pathlib import Path
from typing import Any

from stormtorch.doctor.examination import DirectedLink, Examination

# Shorter delays than this are below that of the lab's own bridge.
_LEAST_DELAY_S = 0.001
_FEWEST_DIGITS = 100


def write_links(found: Examination, path: Path) -> None:
    """Writes the file. In the lab, rank 2 becomes host 2."""
    data: dict[str, Any] = {"links": [_link(link) for _, link in sorted(found.links.items())]}
    hosts = [line for rank in sorted(found.ranks) if len(line := _host(found, rank)) > 1]
    if hosts:
        data["hosts"] = hosts
    entries = ",\n  ".join(json.dumps(each) for each in data["links"])
    lines = "" if not hosts else ',\n "hosts": [\n  ' + ",\n  ".join(json.dumps(each) for each in hosts) + "]"
    path.write_text(f'{{"links": [\n  {entries}]{lines}}}\n', encoding="utf-8")


def _link(link: DirectedLink) -> dict[str, Any]:
    entry: dict[str, Any] = {"from": link.source, "to": link.target}
    if not link.received:
        entry["loss"] = 1.0
    elif link.sent < _FEWEST_DIGITS or link.overflowed_steady or "1" not in link.lost:
        # Drops at a full buffer belong to the host, not to the link: write the loss rate, not the trace.
        entry["loss"] = round(link.loss, 6)
    else:
        entry["trace"] = link.lost
    if link.round_trip_s is not None and link.round_trip_s / 2 >= _LEAST_DELAY_S:
        entry["delay"] = f"{500 * link.round_trip_s:.3f}ms"
    return entry


def _host(found: Examination, rank: int) -> dict[str, Any]:
    """Entry of a host: its rate is that of its best link, as the others are limited elsewhere."""
    line: dict[str, Any] = {"host": rank}
    own = {
        "up": [link for link in found.links.values() if link.source == rank and link.rate_bits],
        "down": [link for link in found.links.values() if link.target == rank and link.rate_bits],
    }
    for way, links in own.items():
        if links and all(link.limited for link in links):
            line[way] = f"{max(link.bottleneck_bits for link in links) / 1e6:.3f}mbit"
    paths = [link.path_bytes for links in own.values() for link in links if link.path_bytes]
    if paths and max(paths) < min(found.ranks[rank].mtu, 1500):
        line["mtu"] = max(max(paths), 576)
    return line

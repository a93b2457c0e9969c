"""Makes step records from a session, its ledger rows and its transport. The schema is `telemetry/records.py`."""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any, Protocol

import torch
from torch import nn

from stormtorch.collectives import Group
from stormtorch.policies.policy import Policy
from stormtorch.runtime.members.membership import View
from stormtorch.telemetry.ledger import Ledger, LedgerRow
from stormtorch.telemetry.records import VERSION, Record
from stormtorch.telemetry.statistics import mean


class Recorded(Protocol):
    """What records need of a session."""

    model: nn.Module
    ledger: Ledger
    group: Group
    parameters: list[nn.Parameter]
    steps: int
    given_policy: Policy

    @property
    def view(self) -> View:
        """The current members."""
        ...


def rank_record(session: Recorded, parameters: int, started: float) -> Record:
    """Makes the record of this process and of what it trains.

    Args:
        session: The session that was prepared last.
        parameters: Elements of all trained parameters of its model.
        started: When it was prepared.
    """
    transport: Any = session.group.transport
    options, own = transport.options, transport.cards[transport.rank]
    policy = session.given_policy
    return {
        "kind": "rank",
        "time": time.time(),
        "version": VERSION,
        "rank": transport.rank,
        "world": transport.world,
        "incarnation": transport.incarnation(transport.rank),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "job": transport.job,
        "group": transport.name,
        "address": f"{_in_brackets(own.host)}:{own.reception}" if own.reception else "",
        "policy": type(policy).__name__,
        "settings": {each.name: plain(getattr(policy, each.name)) for each in dataclasses.fields(policy)},
        "transport": {
            "silence_s": transport.silence_s,
            "timeout_s": transport.timeout_s,
            "rate": options.rate,
            "sealed": options.key is not None,
            "datagram_bytes": own.datagram_bytes,
        },
        "parameters": parameters,
        "chunk_bytes": transport.chunk_bytes,
        "stormtorch": version("stormtorch"),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "started": started,
    }


def _in_brackets(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def plain(value: Any) -> Any:
    """Converts a setting to what JSON can hold."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value).removeprefix("torch.")[:200]


def steps_record(
    rows: Sequence[LedgerRow], ranks: Mapping[int, int], *, when: float, steps: int, seconds: float
) -> Record:
    """Makes one record of the rows of some steps.

    Args:
        rows: One row or more, in order.
        ranks: Transport rank of each rank number in the rows; a number that it lacks is a transport rank already.
        when: Time at which the last step was complete.
        steps: Number of steps: a row covers several under a policy that averages models.
        seconds: Wall time of these steps.
    """
    last = rows[-1]

    def of_links(links: Sequence[Mapping[int, float]]) -> dict[str, float]:
        sums: dict[int, list[float]] = {}
        for each in links:
            for peer, fraction in each.items():
                sums.setdefault(ranks.get(peer, peer), []).append(fraction)
        return {str(peer): mean(fractions) for peer, fractions in sorted(sums.items())}

    def known(name: str) -> float | None:
        values = [value for row in rows if (value := getattr(row, name)) is not None]
        return mean(values) if values else None

    def total(name: str) -> Any:
        return sum(getattr(row, name) for row in rows)

    return {
        "kind": "steps",
        "time": when,
        "step": last.step,
        "steps": steps,
        "seconds": seconds,
        **{name: total(name) for name in ("gradient_wait_s", "broadcast_wait_s", "view_wait_s", "bytes_sent")},
        "arrived": mean([row.arrived for row in rows]),
        "gradients": of_links([row.gradients for row in rows]),
        "broadcast": of_links([row.broadcast for row in rows]),
        "lag": {str(age): chunks for age, chunks in sorted(last.lag.items())},
        "lead": last.lead,
        "loss": last.loss,
        **{name: known(name) for name in ("pair_drift", "owner_drift", "update_variance", "pair_bound")},
        "effective_batch": mean([row.effective_batch for row in rows]),
        "variance_inflation": mean([row.variance_inflation for row in rows]),
        "fetched": total("fetched"),
        "guarded": total("guarded"),
        "missing": [ranks.get(peer, peer) for peer in last.missing],
    }


def links_record(transport: Any, members: Sequence[int], step: int) -> Record:
    """Makes the record of this rank's links. It may be called in any thread.

    Args:
        transport: A transport over UDP.
        members: The current members.
        step: Steps so far.

    Raises:
        StormError: The transport is closed.
    """
    connectivity, waits = transport.connectivity(), transport.waits
    last_received = connectivity["heard_s"]
    peers = [peer for peer in members if peer != transport.rank]
    links = {
        str(peer): {
            "rtt_s": rtt_s,
            "loss": loss,
            "rate": rate if math.isfinite(rate) else 0.0,
            "path_bytes": path_bytes,
            **({"heard_s": last_received[peer]} if peer in last_received else {}),
            **_paths(transport, peer),
        }
        for peer, (rtt_s, loss, rate, path_bytes) in zip(peers, transport.links(peers), strict=True)
    }
    now = time.monotonic()
    return {
        "kind": "links",
        "time": time.time(),
        "step": step,
        "links": links,
        "health": _flat(transport.health()),
        "cpu_s": time.process_time(),
        "quorum": bool(connectivity["quorum"]),
        "waits": None
        if waits is None
        else {"call": waits.call, "seconds": now - waits.since, "peers": sorted(waits.peers)},
    }


def _paths(transport: Any, peer: int) -> dict[str, Any]:
    """Returns the record fields about the paths to a peer; none if there is only one path."""
    if len(transport.options.interfaces) < 2 or len(paths := transport.paths(peer)) < 2:
        return {}
    return {
        "paths": {
            str(number): {
                "up": each.up,
                "rtt_s": each.round_trip_s,
                "loss": each.loss,
                "rate": each.bytes_per_s if math.isfinite(each.bytes_per_s) else 0.0,
                "bytes_sent": each.bytes_sent,
                "bytes_received": each.bytes_received,
                "outages": each.outages,
            }
            for number, each in enumerate(paths)
        }
    }


def _flat(health: Mapping[str, Any]) -> dict[str, float]:
    """Returns the non-zero counters in one flat dictionary: most counters stay 0."""
    faults = {f"faults_{name}": number for name, number in health.get("faults", {}).items() if number}
    return {name: int(number) for name, number in health.items() if number and name != "faults"} | faults


def view_record(number: int, step: int, members: Sequence[int], before: Sequence[int]) -> Record:
    """Makes the record of a view that begins."""
    return {
        "kind": "view",
        "time": time.time(),
        "number": number,
        "step": step,
        "members": list(members),
        "left": [rank for rank in before if rank not in members],
        "came": [rank for rank in members if rank not in before] if before else [],
    }

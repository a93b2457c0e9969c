"""JSON snapshot of a job: the data that the page, the report and the terminal show."""

import math
from typing import Any

from stormtorch.watch.cost import NetworkCost, network_cost
from stormtorch.watch.diagnoses import JobDiagnosis
from stormtorch.watch.fields import clean
from stormtorch.watch.job import Job, named
from stormtorch.watch.job_snapshot import JobSnapshot, LinkState
from stormtorch.watch.process import Process
from stormtorch.watch.verdict import judge

VERSION = 1
"""Version of this layout."""
MOST_MATRIX = 128
"""Jobs with more ranks get only the list of worst links: a cell of the matrix would be smaller than a letter."""
_WORST = 20
_SHOWN_NOTES = 200


def snapshot(job: Job, now: float, source: str, *, since: int = 0, width_s: float | None = None) -> dict[str, Any]:
    """Returns the state of a job as plain data.

    Args:
        job: The job.
        now: Unix time by the watcher's clock.
        source: Description of the source of its records.
        since: First bin of the time series to return.
        width_s: Bin width that the reader knows. If it has changed, all bins are returned.
    """
    job_snapshot = JobSnapshot(job, now)
    diagnoses, cost = judge(job_snapshot), network_cost(job_snapshot)
    if width_s is not None and width_s != job.series.width_s:
        since = 0
    return {
        "version": VERSION,
        "now": round(now, 3),
        "source": clean(source),
        "state": job_snapshot.state.value,
        "told": round(job.arrived, 3),
        "job": _job(job_snapshot),
        "verdict": [_diagnosis(each) for each in diagnoses[:6]],
        "cost": _cost(cost),
        "ranks": [_rank(job_snapshot, rank, process) for rank, process in job_snapshot.everyone.items()],
        "slowest": job_snapshot.slowest,
        "matrix": _matrix(job_snapshot) if len(job_snapshot.live) <= MOST_MATRIX else None,
        "worst": [_link(each) for each in worst_links(job_snapshot)],
        "views": [
            {"number": view.number, "time": view.time, "step": view.step, "members": list(view.members)}
            for view in list(job.views.values())[-_SHOWN_NOTES:]
        ],
        "notes": [
            {
                "time": event.time,
                "kind": event.kind,
                "step": event.step,
                "text": event.text,
                "who": named(sorted(event.ranks)) if event.ranks else "",
            }
            for event in sorted(job.timeline.values(), key=lambda each: each.time)[-_SHOWN_NOTES:]
        ],
        "series": {
            "width_s": job.series.width_s,
            "start": job.series.start,
            "since": since,
            "columns": job.series.columns(since),
        },
    }


def worst_links(job_snapshot: JobSnapshot, most: int = _WORST) -> list[LinkState]:
    """Returns the links with the highest loss; ties are sorted by round trip."""
    return sorted(job_snapshot.links, key=lambda link: (-(link.loss or 0.0), -(link.rtt_s or 0.0)))[:most]


def _job(job_snapshot: JobSnapshot) -> dict[str, Any]:
    first = next(iter(job_snapshot.live.values()), None)
    if first is None:
        return {}
    view = job_snapshot.job.view
    steps = [process.step for process in job_snapshot.everyone.values() if process.step is not None]
    starts = [process.started for process in job_snapshot.everyone.values() if process.started is not None]
    return {
        "name": first.name,
        "policy": first.policy,
        "settings": first.settings,
        "parameters": first.parameters,
        "versions": first.versions,
        "world": first.world,
        "members": len(view.members) if view is not None else len(job_snapshot.live),
        "view": view.number if view is not None else None,
        "step": max(steps, default=None),
        "started": min(starts, default=None),
        "hosts": len({process.host for process in job_snapshot.everyone.values()}),
    }


def _cost(cost: NetworkCost) -> dict[str, Any]:
    values = {name: getattr(cost, name) for name in cost.__slots__}
    return {name: _short(value) for name, value in {**values, "line_share": cost.line_share}.items()}


def _diagnosis(diagnosis: JobDiagnosis) -> dict[str, Any]:
    return {
        "level": diagnosis.level.value,
        "kind": diagnosis.kind,
        "text": diagnosis.text,
        "remedy": diagnosis.remedy,
        "ranks": list(diagnosis.ranks),
        "links": [list(link) for link in diagnosis.links[:200]],
    }


def _rank(job_snapshot: JobSnapshot, rank: int, process: Process) -> dict[str, Any]:
    breakdown = job_snapshot.breakdowns.get(rank)
    totals = job_snapshot.step_totals.get(rank)
    silent_for = [
        link.heard_s
        for other in job_snapshot.live.values()
        if other is not process and (link := other.links.get(rank)) is not None and link.heard_s is not None
    ]
    return {
        "rank": rank,
        "host": process.host,
        "pid": process.pid,
        "incarnation": process.incarnation,
        "state": job_snapshot.states[rank].value,
        "why": process.why,
        "step": process.step,
        "told_s": round(max(0.0, job_snapshot.now - process.arrived), 1),
        "heard_s": _short(max(silent_for, default=None)),
        "split": None if breakdown is None else [_short(each) for each in breakdown],
        "lost": None if totals is None else _short(totals.lost),
        "sent": None if totals is None or not totals.seconds else _short(totals.bytes_sent / totals.seconds),
        "cores": _short(process.cores),
        "overflow": process.counter("overflow"),
        "pool_bytes": process.counter("pool_bytes"),
        "resent": _short(process.resent),
        "lag": max((age for age, chunks in process.lag.items() if chunks), default=None),
        **{name: _short(process.latest.get(name)) for name in ("pair_drift", "pair_bound", "train_loss")},
    }


def _matrix(job_snapshot: JobSnapshot) -> dict[str, Any]:
    """Matrices of loss, round trip and rate: a row per receiver, a column per sender."""
    ranks = list(job_snapshot.live)
    index_of = {rank: index for index, rank in enumerate(ranks)}
    empty: list[list[float | None]] = [[None] * len(ranks) for _ in ranks]
    loss, rtt, rate = ([list(row) for row in empty] for _ in range(3))
    for link in job_snapshot.links:
        row, column = index_of[link.receiver], index_of[link.sender]
        loss[row][column], rtt[row][column] = _short(link.loss), _short(link.rtt_s)
        rate[row][column] = _short(link.rate)
    return {"ranks": ranks, "loss": loss, "rtt": rtt, "rate": rate}


def _link(link: LinkState) -> dict[str, Any]:
    return {
        "sender": link.sender,
        "receiver": link.receiver,
        **{"loss": _short(link.loss), "rtt": _short(link.rtt_s), "rate": _short(link.rate)},
    }


def _short(value: float | None) -> float | None:
    """Rounds to four digits, which is enough for readers; JSON shrinks to a third."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")

"""Records of a job that never ran, for what no test can make happen in a second. Real ones come from watched_job.py."""

from collections.abc import Callable
from typing import Any

from stormtorch.telemetry.records import Record, checked
from stormtorch.watch.job import Job

START = 1_700_000_000.0


def make_records(
    world: int = 4,
    *,
    seconds: int = 20,
    host: Callable[[int], str] = lambda rank: "abcdefghijklmnopqrstuvwxyz"[rank],
    loss: Callable[[int, int], float] = lambda sender, receiver: 0.0001,
    compute_s: Callable[[int], float] = lambda rank: 0.1,
    wait_s: float = 0.01,
    rate: Callable[[int, int], float] = lambda sender, receiver: 5e7,
    rtt_s: Callable[[int, int], float] = lambda sender, receiver: 0.001,
    until: Callable[[int], int | None] = lambda rank: None,
    **more: Any,
) -> dict[int, list[Record]]:
    """Returns the records of each rank: one of steps and one of links for each second. Ranks wait for the slowest.

    `more` has fields of the records: those of kind "steps" as they are, others as `links_...` and `rank_...`.
    """
    found: dict[int, list[Record]] = {}
    slowest = max(compute_s(rank) for rank in range(world))
    steps = {name: value for name, value in more.items() if not name.startswith(("links_", "rank_"))}
    for rank in range(world):
        about = {"kind": "rank", "time": START, "rank": rank, "world": world, "host": host(rank), "pid": 100 + rank}
        about |= {
            "policy": "BoundedDrift",
            "stormtorch": "0.1.0",
            "chunk_bytes": 1400,
            "started": START,
            "job": "first",
            "group": "world",
        }
        records = [about | _of(more, "rank_", rank)]
        records.append({"kind": "view", "time": START, "number": 1, "step": 0, "members": list(range(world))})
        for second in range(1, (until(rank) or seconds) + 1):
            time, peers = START + second, [peer for peer in range(world) if peer != rank]
            wait = slowest - compute_s(rank) + wait_s
            record = {"kind": "steps", "time": time, "step": 4 * second - 1, "steps": 4, "bytes_sent": 4_000_000}
            record |= {"seconds": 4 * (compute_s(rank) + wait), "gradient_wait_s": 4 * wait, "broadcast_wait_s": 0.0}
            lost = sum(loss(peer, rank) for peer in peers) / max(1, len(peers))
            record |= {"arrived": 1.0 - lost, "pair_drift": 1e-6, "pair_bound": 2e-6, "effective_batch": 1.0 - lost}
            records.append(record | {name: _value(value, rank) for name, value in steps.items()})
            links = {
                str(peer): {
                    "loss": loss(peer, rank),
                    "rtt_s": rtt_s(rank, peer),
                    "rate": rate(rank, peer),
                    "heard_s": 0.1,
                }
                for peer in peers
            }
            record = {"kind": "links", "time": time, "links": links, "health": {"overflow": 0}, "cpu_s": 0.5 * second}
            records.append(record | _of(more, "links_", rank))
        found[rank] = records
    return found


def job_of(records: dict[int, list[Record]]) -> Job:
    """Returns the job that these records tell of; each must be as the schema wants it."""
    job = Job()
    for rank, mine in records.items():
        for record in mine:
            right = checked(record)
            assert right is not None, record
            job.add(f"rank-{rank}", right)
    return job


def _of(more: dict[str, Any], prefix: str, rank: int) -> Record:
    return {name.removeprefix(prefix): _value(value, rank) for name, value in more.items() if name.startswith(prefix)}


def _value(value: Any, rank: int) -> Any:
    return value(rank) if callable(value) else value

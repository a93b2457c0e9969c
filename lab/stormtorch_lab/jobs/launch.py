"""Runs the ranks of a benchmark on this machine, or on hosts of a lab whose loss begins after the checks."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from stormtorch.telemetry.progress import Advance
from stormtorch_lab.jobs.control import LabRequest
from stormtorch_lab.jobs.mpi import mpi_version, run_ranks_by_mpi
from stormtorch_lab.jobs.ranks import run_ranks
from stormtorch_lab.jobs.surroundings import StealTime
from stormtorch_lab.netns.access import checked_tcp
from stormtorch_lab.netns.conditions import Conditions
from stormtorch_lab.netns.lab import Lab
from stormtorch_lab.netns.measured import Measured

Result = TypeVar("Result")


def open_lab(hosts: int, network: Conditions, tcp: Sequence[str] = ()) -> Lab:
    """Makes the lab, for a `with` statement. It has no loss until the ranks of `run_in_lab` have checked their results.

    Args:
        hosts: Number of hosts.
        network: Conditions of the lab.
        tcp: Congestion controls that the kernel must have.
    """
    for congestion_control in tcp:
        checked_tcp(congestion_control)
    # With the loss, although it begins later: it decides on the kind of network.
    return Lab(hosts, network, management=True)


def run_local(
    work: Callable[..., Result],
    hosts: int,
    args: tuple[Any, ...],
    *,
    timeout_s: float,
    advance: Advance,
    on_report: Callable[[object], None] | None = None,
    by_mpi: bool = False,
) -> tuple[list[Result], dict[str, Any]]:
    """Runs ranks on this machine. Returns their results, and a description of the machine as plain data. After each
    round, ranks report a measurement: it goes to `on_report`, or else as a text to `advance`. With `by_mpi`, mpirun
    starts them.
    """
    on_round = _rounds(advance, f"{hosts} ranks", on_report)
    place: dict[str, Any] = {"network": "loopback"}
    withheld = StealTime()
    if by_mpi:
        place["started_by"] = mpi_version()
        results = run_ranks_by_mpi(work, hosts, args, timeout_s=timeout_s, on_message=on_round)
    else:
        results = run_ranks(work, hosts, args, timeout_s=timeout_s, on_message=on_round)
    return results, place | {"processors_withheld": withheld.share()}


def run_in_lab(
    work: Callable[..., Result],
    lab: Lab,
    network: Conditions,
    hosts: int,
    args: tuple[Any, ...],
    *,
    timeout_s: float,
    advance: Advance,
    on_report: Callable[[object], None] | None = None,
    per_host: int = 1,
) -> tuple[list[Result], dict[str, Any]]:
    """Runs ranks in a lab with the requested conditions, `per_host` on each host; requests of rank 0 switch its loss
    on. Returns what `run_local` returns.
    """
    lab.set(loss=0.0)
    counts: list[Measured] = []
    withheld = StealTime()
    on_round = _rounds(advance, f"{hosts} hosts", on_report)

    def on_message(rank: int, what: object) -> None:
        if what is LabRequest.LOSE:
            lab.set(loss=network.loss)
        elif what is LabRequest.COUNT:
            if not counts:
                lab.reset()
        elif what is LabRequest.READ:
            counts.append(lab.measured())
        else:
            on_round(rank, what)

    world = hosts * per_host
    results = run_ranks(work, world, args, timeout_s=timeout_s, on_message=on_message, lab=lab, per_host=per_host)
    measured = counts[-1]
    conditions = {
        "network": f"lab: {lab.kind}",
        "lab_made_by": lab.access.name,
        "requested": lab.conditions.to_json(),
        "measured": measured.to_json(),
        "loss_measured": measured.loss,
        "overflow_measured": measured.overflow,
        "processors_withheld": withheld.share(),
    }
    if lab.conditions.tcp is not None:
        conditions["tcp_congestion_control"] = lab.conditions.tcp
    return results, conditions


def _rounds(advance: Advance, where: str, on_report: Callable[[object], None] | None) -> Callable[[int, object], None]:
    done = 0

    def on_round(_rank: int, what: object) -> None:
        nonlocal done
        if on_report is not None:
            on_report(what)
            return
        done += 1
        advance(f"{what} on {where}", done)

    return on_round

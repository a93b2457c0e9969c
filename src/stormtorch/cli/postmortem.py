"""`stormtorch postmortem`: the first collective in which ranks differ, from their flight records."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stormtorch.cli.console import check_outputs, friendly_errors, save, save_into
from stormtorch.cli.terminal.options import Json

if TYPE_CHECKING:
    from stormtorch.telemetry.postmortem import FlightRecord, GroupFailure


def postmortem(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Flight records of several ranks, storm-flight-*.json, or folders that contain them.",
            metavar="FILE...",
            show_default="the folder where ranks of this machine write them",
        ),
    ] = None,
    job: Annotated[
        str | None,
        typer.Option(help="Run to explain.", show_default="the one that failed last", metavar="ID"),
    ] = None,
    json: Json = None,
    torch: Annotated[
        Path | None,
        typer.Option(help="Also write the records into this folder in the format of torch's flight recorder."),
    ] = None,
) -> None:
    """Find the rank that diverged first, from the ranks' flight records.

    When an operation of torch.distributed fails, the rank writes its last operations to a file: in the folder of
    STORM_FLIGHT_DIR, or in a private one that its log names. Collect the files of all hosts and name them here.
    A folder may hold records of several runs: the run that failed last is explained, the others are counted.
    The result comes first, then what each rank did around that point. Collectives are compared by their sequence
    number in their group, their name and their size; sends and receives are only listed.

    [bold]Examples[/bold]

      stormtorch postmortem                            records of this machine's ranks
      stormtorch postmortem flights                    records of STORM_FLIGHT_DIR=flights
      stormtorch postmortem flights/storm-flight-*.json --json found.json
      stormtorch postmortem flights --torch traces     for torch.distributed.flight_recorder.fr_trace
    """
    with friendly_errors():
        from rich.console import Console

        from stormtorch.cli.tables.postmortem import show_failures
        from stormtorch.telemetry.folders import flights_folder
        from stormtorch.telemetry.json_files import write_json
        from stormtorch.telemetry.postmortem import find, read_flight_records

        check_outputs(json)
        try:
            flights = read_flight_records(files or [flights_folder()])
        except (ValueError, PermissionError) as error:
            raise typer.BadParameter(str(error), param_hint="FILE") from error
        flights = _of_job(flights, job)
        failures = find(flights)
        save(lambda path: write_json(path, {"findings": [_plain(each) for each in failures]}), json)
        if torch is not None:
            _write_for_torch(flights, torch)
        show_failures(failures, Console())


def _of_job(flights: "list[FlightRecord]", job: str | None) -> "list[FlightRecord]":
    """Chooses the records of one run, and prints how many belong to others."""
    runs: dict[str, list[FlightRecord]] = {}
    for flight in sorted(flights, key=lambda each: each.time):
        runs.setdefault(flight.job, []).append(flight)
    chosen = next(reversed(runs)) if job is None else job
    if chosen not in runs:
        raise typer.BadParameter(
            f"no record belongs to run {chosen!r}: there are {', '.join(runs)}", param_hint="--job"
        )
    for name, others in runs.items():
        if name != chosen:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(others[-1].time))
            records = "1 record" if len(others) == 1 else f"{len(others)} records"
            typer.echo(f"left out: {records} of a run that failed at {when}; choose it by --job {name}", err=True)
    return runs[chosen]


def _write_for_torch(flights: "list[FlightRecord]", folder: Path) -> None:
    from stormtorch.telemetry.torch_flights import PREFIX, write_for_torch

    def write(path: Path) -> None:
        for inside in write_for_torch(flights, path):
            command = f"python -m torch.distributed.flight_recorder.fr_trace {inside} --prefix {PREFIX}"
            typer.echo(f"analyse them with torch: {command}", err=True)

    save_into(write, folder)


def _plain(failure: "GroupFailure") -> dict[str, object]:
    return {
        "group": failure.group,
        "sentence": failure.sentence,
        "collective": failure.number,
        "culprits": failure.culprits,
        "without_record": failure.silent,
        "errors": {str(flight.rank): flight.error for flight in failure.flights},
        "did": {
            str(flight.rank): flight.collectives[failure.number].text
            for flight in failure.flights
            if failure.number in flight.collectives
        },
    }

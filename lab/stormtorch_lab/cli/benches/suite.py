"""The command `stormtorch bench all`: runs the other benchmarks, each in its own process, and estimates the time."""

import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from stormtorch.cli.console import friendly_errors, names
from stormtorch.cli.terminal.completion import complete_choice_list
from stormtorch_lab.cli.terminal.choices import SUITE


def all_parts(
    only: Annotated[
        str | None,
        typer.Option(
            help="Parts to measure, separated by commas.",
            show_default=f"{SUITE}",
            autocompletion=complete_choice_list(SUITE),
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for one JSON file per measurement.", file_okay=False)] = Path(
        "build/bench"
    ),
) -> None:
    """Measure everything against gloo, and write one JSON file per measurement.

    Parts: all-reduce and latency of 2 and 4 ranks, training steps, two hosts joined by a cable, a lab of 1 Gbit/s, the
    hierarchy in a lab, and MPI where it is installed. A part that this machine cannot measure is skipped, with the
    reason. A part that fails or times out does not stop the others; the exit status is then 1.

    [bold]Examples[/bold]

      stormtorch bench all
      stormtorch bench all --only allreduce,latency --out results
    """
    with friendly_errors():
        from stormtorch_lab.bench.suite import chosen

        console = Console(stderr=True, highlight=False)
        measurements = chosen(names(SUITE if only is None else only))
        reasons = _reasons()
        left_out = [each for each in measurements if _reason(each.part, each.lab, reasons)]
        for part in dict.fromkeys(each.part for each in left_out):
            lab = any(each.lab for each in left_out if each.part == part)
            console.print(f"{part} is skipped: {_reason(part, lab, reasons)}", markup=False, soft_wrap=True)
        measurements = [each for each in measurements if each not in left_out]
        out.mkdir(parents=True, exist_ok=True)
        left_s = sum(each.about_s for each in measurements)
        failed = []
        for index, each in enumerate(measurements):
            words = [*shlex.split(each.words), "--json", str(out / f"{each.file}.json")]
            line = f"{index + 1} of {len(measurements)}, about {_minutes(left_s)} left: stormtorch bench {each.words}"
            console.print(line, style="bold", markup=False, soft_wrap=True)
            if not _measured(words, each.at_most_s):
                failed.append(each.file)
            left_s -= each.about_s
        if failed:
            console.print(f"failed: {', '.join(failed)}", style="bold red", markup=False, soft_wrap=True)
            raise typer.Exit(1)


def _reasons() -> dict[str, str]:
    """Reasons why this machine has no lab or no MPI, by name; a missing key means that it has."""
    from stormtorch.checks import BadSetting
    from stormtorch_lab.jobs.mpi import check_mpi
    from stormtorch_lab.netns.access import LabUnavailable
    from stormtorch_lab.netns.lab import try_lab

    reasons = {}
    try:
        try_lab()
    except LabUnavailable as error:
        reasons["lab"] = str(error)
    try:
        check_mpi()
    except BadSetting as error:
        reasons["mpi"] = f"this machine {error.problem}"
    return reasons


def _reason(part: str, lab: bool, reasons: dict[str, str]) -> str:
    return reasons.get("lab", "") if lab else reasons.get("mpi", "") if part == "mpi" else ""


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def _measured(words: list[str], at_most_s: float) -> bool:
    """Runs one command and returns whether it succeeded. Ctrl-C also ends the command."""
    process = subprocess.Popen([sys.executable, "-m", "stormtorch.cli", "bench", *words])
    deadline = time.monotonic() + at_most_s
    try:
        return process.wait(deadline - time.monotonic()) == 0
    except subprocess.TimeoutExpired:
        typer.echo(f"timed out after {at_most_s:g} s", err=True)
        return False
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()

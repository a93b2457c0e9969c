"""`stormtorch bench colocate-virtual`: a training beside a service in virtual time, at the published scale."""

from typing import Annotated

import typer
from rich.console import Console

from stormtorch.checks import BadSetting
from stormtorch.cli.console import check_outputs, friendly_errors, handle_termination_signals, numbers, save
from stormtorch.cli.terminal.completion import complete_choice
from stormtorch.cli.terminal.options import Json, Plot

_TARGETS_S = (0.002, 0.005, 0.010)


def colocate_virtual(
    scale: Annotated[
        str,
        typer.Option(
            help="paper: 16 hosts at 1 Gbit/s, 2.4 Gbit/s of training in all; lab: 8 hosts at 100 Mbit/s, as "
            "in `bench colocate`.",
            autocompletion=complete_choice("paper,lab"),
        ),
    ] = "paper",
    requests: Annotated[
        str, typer.Option(help="Requests per second of all hosts, separated by commas. [default: by scale]")
    ] = "",
    shares: Annotated[
        str,
        typer.Option(help="Shares of a link that the training keeps while the service could use all of it; 0 is none."),
    ] = "0.5,0.05,0",
    slacks: Annotated[
        str, typer.Option(help="Deadlines of each stage of an exchange, as multiples of its time without the service.")
    ] = "2,3,6",
    sending: Annotated[
        str,
        typer.Option(
            help="Rate of the training: auto bursts at the rate of the link; 300mbit spreads an exchange over time."
        ),
    ] = "auto",
    seconds: Annotated[float, typer.Option(help="Measured seconds of virtual time in each run.")] = 1.2,
    seeds: Annotated[int, typer.Option(help="Runs of each case, each with its own request arrivals.")] = 1,
    at_mean: Annotated[
        bool,
        typer.Option(help="Also find the requests per second that are carried at a mean latency of 2, 5 and 10 ms."),
    ] = True,
    processes: Annotated[int, typer.Option(help="Number of runs in parallel, one process each.")] = 2,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Run a training beside a service in virtual time: what does packet loss of the training buy the service?

    The training's packets come from the engine's own core. Links, switch and the TCP of the service are models (two
    traffic classes as in Linux's htb; slow start, CUBIC, fast retransmit). It needs no lab, and the same seed gives the
    same result. For each rate of requests and each allowed loss, the table has the preference and the deadline that
    speed up the service most.

    [bold]Examples[/bold]

      stormtorch bench colocate-virtual --json virtual.json --plot virtual.png
      stormtorch bench colocate-virtual --scale lab --requests 100,200,400 --seeds 3
    """
    with friendly_errors(), handle_termination_signals():
        from dataclasses import replace

        from stormtorch.cli.terminal.screen import progress_bar
        from stormtorch_lab.cli.plots.virtual import plot_virtual
        from stormtorch_lab.cli.tables.virtual import virtual_table
        from stormtorch_lab.studies.colocation.run import Colocation
        from stormtorch_lab.studies.colocation.sweep import CARRY_RATES, RATES, Sweep, run_sweep

        if scale not in ("paper", "lab"):
            raise BadSetting("scale", f"must be paper or lab, got {scale!r}")
        if processes < 1:
            raise BadSetting("processes", f"must be at least 1, got {processes}")
        base = Colocation() if scale == "paper" else Colocation.of_the_lab()
        rates = RATES if scale == "paper" else (125.0, 250.0, 500.0)
        sweep = Sweep(
            base=replace(base, sending=sending, seconds=seconds if scale == "paper" else 5 * seconds),
            requests=numbers("requests", requests) if requests else rates,
            shares=numbers("shares", shares),
            slacks=numbers("slacks", slacks),
            more_requests=CARRY_RATES if at_mean and scale == "paper" else (),
            seeds=seeds,
        )
        check_outputs(json, plot)
        with progress_bar(len(sweep.runs()), "runs in virtual time", unit="runs") as advance:
            study = run_sweep(sweep, lambda done: advance("runs in virtual time", done), processes=processes)
        Console().print(virtual_table(study, _TARGETS_S))
        save(lambda path: study.write(path, _TARGETS_S), json)
        save(lambda path: plot_virtual(study, _TARGETS_S, path), plot)

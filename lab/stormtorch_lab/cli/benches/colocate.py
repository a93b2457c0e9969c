"""The command `stormtorch bench colocate`: options, progress, table and plot."""

from typing import Annotated

import typer
from rich.console import Console

from stormtorch.checks import BadSetting, blaming
from stormtorch.cli.console import check_outputs, friendly_errors, handle_termination_signals, names, numbers, save
from stormtorch.cli.terminal.completion import complete_choice, complete_choice_list
from stormtorch.cli.terminal.options import Json, Plot
from stormtorch_lab.cli.terminal.choices import NEIGHBOURS, YieldTo
from stormtorch_lab.cli.terminal.options import (
    Batch,
    Context,
    FirstSeed,
    Layers,
    LowQueue,
    Queue,
    Tcp,
    TextData,
    Timeout,
)

_SERVICE, _TRAINING, _LAB = "The service", "The training", "A lab's network"


def colocate(
    ranks: Annotated[int, typer.Option(help="Hosts, each with a server, a client and a rank: 2 to 64.")] = 8,
    train: Annotated[
        str,
        typer.Option(
            help="Trainings beside the service, separated by commas: model-averaging, lead, ddp (on gloo, of "
            "normal priority), ddp-low (marked as low), none (the service alone).",
            autocompletion=complete_choice_list(NEIGHBOURS),
        ),
    ] = "model-averaging,none",
    prefer: Annotated[
        str,
        typer.Option(
            help="How strongly the service is preferred, separated by commas. equal: one traffic class for all "
            "packets; a number: the training is marked as low priority and keeps that share of a link while the "
            "service wants it all.",
            autocompletion=complete_choice("equal,0.3,0.1,0.02"),
        ),
    ] = "equal,0.3,0.1,0.02",
    seconds: Annotated[
        float,
        typer.Option(help="Seconds of each run in which requests are measured; the training runs for all of them."),
    ] = 10.0,
    yield_to: Annotated[
        YieldTo,
        typer.Option(
            help="How a training of low priority yields: classes leaves it to the traffic classes of the links; "
            "latency and queues also make the training send less.",
        ),
    ] = YieldTo.classes,
    seeds: Annotated[
        int, typer.Option(help="Repetitions of every run, each with its own weights, batches and request arrivals.")
    ] = 1,
    first_seed: FirstSeed = 0,
    requests: Annotated[
        str,
        typer.Option(help="Requests per second of all hosts, separated by commas.", rich_help_panel=_SERVICE),
    ] = "100,200,400",
    size: Annotated[int, typer.Option(help="Bytes of a response.", rich_help_panel=_SERVICE)] = 100_000,
    request_timeout: Annotated[
        str, typer.Option(help="Time after which a request counts as failed.", rich_help_panel=_SERVICE)
    ] = "5s",
    at_latency: Annotated[
        str,
        typer.Option(
            help="Mean latency at which the carried requests per second are compared, interpolated between --requests.",
            rich_help_panel=_SERVICE,
        ),
    ] = "20ms",
    steps: Annotated[
        int,
        typer.Option(
            help="Steps after which each training is evaluated on held-out text; rounded up to a multiple of 4.",
            rich_help_panel=_TRAINING,
        ),
    ] = 16,
    slack: Annotated[
        float,
        typer.Option(
            help="Deadline of each stage of an exchange, as a multiple of its time without the service.",
            rich_help_panel=_TRAINING,
        ),
    ] = 1.5,
    deadline: Annotated[
        str | None,
        typer.Option(
            help="Deadline of each stage as a time, such as 200ms, in place of --slack.",
            show_default="--slack times the measured time",
            rich_help_panel=_TRAINING,
        ),
    ] = None,
    allowed_loss: Annotated[
        float | None,
        typer.Option(
            help="Fraction of loss that the training accepts to stay fast, such as 0.1; it learns its deadlines from "
            "that, in place of --slack.",
            show_default="follows from the deadline",
            rich_help_panel=_TRAINING,
        ),
    ] = None,
    layers: Layers = 2,
    width: Annotated[
        int,
        typer.Option(
            help="Width of the model, a multiple of 64: 2 layers of 128 have 0.43 M parameters.",
            rich_help_panel="The model",
        ),
    ] = 128,
    batch: Batch = 8,
    context: Context = 64,
    lr: Annotated[
        float,
        typer.Option(help="Constant learning rate of AdamW.", rich_help_panel="The model"),
    ] = 1e-3,
    data: TextData = None,
    rate: Annotated[
        str, typer.Option(help="Rate of each host's access link, both ways: 100mbit, 1gbit.", rich_help_panel=_LAB)
    ] = "100mbit",
    queue: Queue = None,
    low_queue: LowQueue = None,
    tcp: Tcp = None,
    json: Json = None,
    plot: Plot = None,
    timeout_s: Timeout = 3600.0,
) -> None:
    """Run a web service beside a training on the same links, and measure what each costs the other.

    Every host of a lab runs nginx, a client that fetches files from all others, and a rank that trains a small
    language model. Each exchange of the training has a deadline and goes on without the chunks that are missing
    by then. So the training can have the lowest priority: the service becomes faster, and the training loses packets.
    The table has one row for each preference and rate. speed-up: mean latency beside the same training at equal
    priority, divided by this one. loss: fraction of the training's chunks that did not arrive. validation: held-out
    loss divided by that of the same training alone.
    Requests arrive as a Poisson process and are sent when they are due (open loop). Latency counts from the due time,
    so a stall shows in all requests that were due meanwhile. late: how long after its due time a client sent a request.
    Servers and clients run at a lower niceness than the training, where this user may set it.
    Each training first runs alone, to measure the deadline, its validation loss, and its loss without any service,
    which comes from ranks that wait for processors. Preferences alternate. Ctrl-C keeps the finished runs.
    It needs a lab, nginx (apt-get install nginx-light) and aiohttp (pip install aiohttp).

    [bold]Examples[/bold]

      stormtorch bench colocate --json colocate.json --plot colocate.png
      stormtorch bench colocate --ranks 4 --prefer equal,0.02 --requests 100 --seconds 5
      stormtorch bench colocate --train model-averaging,lead,ddp,ddp-low,none --seeds 3
      stormtorch bench colocate --deadline 200ms --at-latency 15ms --requests 50,100,200,400
      stormtorch bench colocate --allowed-loss 0.1 --requests 200 --seconds 20
      stormtorch bench colocate --prefer 0.02 --requests 100 --seconds 600
    """
    with friendly_errors(), handle_termination_signals():
        from stormtorch.cli.terminal.screen import progress_bar
        from stormtorch_lab.bench.services.colocate import ColocateSettings
        from stormtorch_lab.bench.services.colocate_results import ColocateReport
        from stormtorch_lab.bench.services.colocate_run import run_colocate
        from stormtorch_lab.bench.services.service import find_nginx
        from stormtorch_lab.cli.plots.colocate import plot_colocate
        from stormtorch_lab.cli.tables.colocate import colocate_table
        from stormtorch_lab.netns.conditions import Conditions

        given = {"queue": queue, "low_queue": low_queue, "tcp": tcp}
        with blaming("rate", "low_share"):
            network = Conditions(rate=rate, **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]  # Conditions checks them all
        settings = ColocateSettings(
            ranks=ranks,
            train=names(train),
            prefer=_preferences(prefer),
            yield_to=yield_to.value,
            requests=numbers("requests", requests),
            size=size,
            seconds=seconds,
            steps=steps,
            slack=slack,
            deadline_s=None if deadline is None else _time("deadline", deadline),
            allowed_loss=allowed_loss,
            at_latency_s=_time("at_latency", at_latency),
            network=network,
            layers=layers,
            width=width,
            batch=batch,
            context=context,
            lr=lr,
            text=data,
            seeds=seeds,
            first_seed=first_seed,
            request_timeout_s=_time("request_timeout", request_timeout),
            timeout_s=timeout_s,
        )
        check_outputs(json, plot)
        find_nginx()
        report = ColocateReport.begin(settings)
        try:
            with progress_bar(len(settings.cases()), "making a lab and starting processes", unit="runs") as advance:

                def keep(run: object) -> None:
                    report.runs.append(run)  # type: ignore[arg-type]  # imported where it is known
                    save(report.write, json)  # after every run, so that an interrupted command keeps its results

                run_colocate(settings, keep, advance, report.conditions.update)
        finally:
            if report.rows():
                Console().print(colocate_table(report))
                save(lambda path: plot_colocate(report, path), plot)


def _preferences(text: str) -> tuple[float | None, ...]:
    """Parses preferences: equal, or shares of a link."""
    try:
        return tuple(None if name == "equal" else float(name) for name in names(text))
    except ValueError as error:
        raise BadSetting("prefer", f"must be equal or numbers in [0, 1), separated by commas, got {text!r}") from error


def _time(option: str, text: str) -> float:
    from stormtorch.network.units import parse_time

    try:
        return parse_time(text, option)
    except ValueError as error:
        raise BadSetting(option, str(error).removeprefix(f"{option} ")) from error

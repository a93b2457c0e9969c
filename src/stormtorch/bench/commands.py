"""The commands of `stormtorch bench`: they check what was typed, show progress and tables; others do the work."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from stormtorch.console import check_file, friendly_errors, names, numbers

if TYPE_CHECKING:
    from stormtorch.lab.conditions import Conditions

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")

# Declared here, so that --help answers without importing torch; a test compares them with the real ones.
_BACKENDS = "storm,storm-lossy,gloo"
_LAB_BACKENDS = "storm,storm-lossy,gloo-bbr,gloo-cubic"
_MANNERS = "all-to-all,incast,tcp,low,step"
_WARMUP, _LAB_WARMUP = 3, 1


class Dtype(StrEnum):
    """What can be summed."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


_LAB = "In a lab"
Hosts = Annotated[int, typer.Option(help="Ranks, each a process of this machine: 2 to 64.")]
Warmup = Annotated[int, typer.Option(help="Rounds before the timed ones; their results are checked.")]
Backends = Annotated[str, typer.Option(help="Which to compare, separated by commas.")]
Json = Annotated[Path | None, typer.Option(help="Write conditions and results to this file.", dir_okay=False)]
Plot = Annotated[
    Path | None, typer.Option(help="Draw the times into this .png, .svg or .pdf; needs matplotlib.", dir_okay=False)
]
Timeout = Annotated[float, typer.Option(help="Give up after so many seconds in all.")]
Burst = Annotated[float | None, typer.Option(help="Mean length of a run of losses.", rich_help_panel=_LAB)]
Queue = Annotated[
    str | None,
    typer.Option(help="What may wait at each end of a line.", rich_help_panel=_LAB, show_default="512kb"),
]
Patience = Annotated[
    float,
    typer.Option(
        "--patience-s",
        "--patience",
        help="Give up a TCP call after so many seconds; who has used as many sits out the other rounds.",
        rich_help_panel=_LAB,
    ),
]


@app.command()
def allreduce(
    hosts: Hosts = 2,
    mb: Annotated[str, typer.Option(help="Sizes of the tensor in MB (10^6 bytes), separated by commas.")] = "25",
    iters: Annotated[int, typer.Option(help="Timed rounds per size.")] = 20,
    warmup: Annotated[
        int | None,
        typer.Option(
            help="Rounds before the timed ones; their results are checked.",
            show_default=f"{_WARMUP}; in a lab {_LAB_WARMUP}",
        ),
    ] = None,
    backends: Annotated[
        str | None,
        typer.Option(
            help="Which to compare, separated by commas. In a lab there are also gloo-bbr and gloo-cubic, by TCP's "
            "congestion control.",
            show_default=f"{_BACKENDS}; in a lab {_LAB_BACKENDS}",
        ),
    ] = None,
    faults: Annotated[
        float,
        typer.Option(help="On loopback: fraction of storm's datagrams to lose, 0 to 0.9. gloo cannot feel it."),
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the loss.")] = 0,
    dtype: Annotated[Dtype, typer.Option(help="Of the tensor.")] = Dtype.float32,
    datagram_bytes: Annotated[
        int | None,
        typer.Option(help="Payload of a datagram, 256 to 65507: 1472 is Ethernet's. Default: what the network takes."),
    ] = None,
    json: Json = None,
    plot: Plot = None,
    timeout_s: Timeout = 600.0,
    rate: Annotated[
        str | None, typer.Option(help="Of each host's line, such as 400mbit.", rich_help_panel=_LAB)
    ] = None,
    loss: Annotated[
        float | None, typer.Option(help="Fraction of all packets to lose, TCP's as well: 0 to 1.", rich_help_panel=_LAB)
    ] = None,
    burst: Burst = None,
    delay: Annotated[
        str | None,
        typer.Option(help="From host to host, one way, such as 20ms: a round trip takes twice.", rich_help_panel=_LAB),
    ] = None,
    jitter: Annotated[str | None, typer.Option(help="Up to so much more delay.", rich_help_panel=_LAB)] = None,
    queue: Queue = None,
    tcp: Annotated[
        str | None, typer.Option(help="Congestion control that plain gloo meets.", rich_help_panel=_LAB)
    ] = None,
    patience_s: Patience = 30.0,
) -> None:
    """Time the all-reduce of large tensors, beside gloo.

    On loopback, between processes of this machine, as long as no option of a lab is given.
    With any of them, on virtual hosts of a lab, whose network loses packets of all backends alike.
    The backends take turns within every round.
    A time is that of the slowest rank; "x gloo" (the first one) and "x ideal" are ratios of medians.
    Ideal is the rate of the lines; on loopback, what this machine needs just to copy as many bytes in and out.

    [bold]Examples[/bold]

      stormtorch bench allreduce --hosts 4 --mb 25,100 --json out.json

      stormtorch bench allreduce --hosts 4 --rate 400mbit --loss 0.1

      stormtorch bench allreduce --hosts 4 --rate 100mbit --delay 20ms --mb 5 --loss 0.01 --burst 8

      stormtorch bench allreduce --faults 0.01 --datagram-bytes 1472 --plot out.png
    """
    with friendly_errors():
        from stormtorch.bench.allreduce import AllReduceSettings, run_allreduce
        from stormtorch.bench.display import progress_bar
        from stormtorch.bench.plot import check_plot, plot_allreduce
        from stormtorch.bench.tables import allreduce_table

        network = _network(seed, rate=rate, loss=loss, burst=burst, delay=delay, jitter=jitter, queue=queue, tcp=tcp)
        settings = AllReduceSettings(
            hosts=hosts,
            mb=numbers("mb", mb),
            iters=iters,
            warmup=warmup if warmup is not None else _WARMUP if network is None else _LAB_WARMUP,
            backends=names(backends or (_BACKENDS if network is None else _LAB_BACKENDS)),
            network=network,
            faults=faults,
            seed=seed,
            dtype=dtype.value,
            datagram_bytes=datagram_bytes,
            patience_s=patience_s,
            timeout_s=timeout_s,
        )
        check_file("json", json)
        if plot is not None:
            check_plot(plot)
            check_file("plot", plot)
        with progress_bar(iters * len(settings.mb), f"starting {hosts} processes") as advance:
            report = run_allreduce(settings, advance)
        Console().print(allreduce_table(report))
        if json is not None:
            report.write(json)
        if plot is not None:
            plot_allreduce(report, plot)


def _network(seed: int, **conditions: str | float | None) -> "Conditions | None":
    """None where no condition was given: that is loopback."""
    from stormtorch.lab.conditions import BadCondition, Conditions

    given = {name: value for name, value in conditions.items() if value is not None}
    if not given:
        return None
    if "burst" in given and "loss" not in given:
        raise BadCondition("burst", "needs a --loss that comes in bursts")
    return Conditions(seed=seed, **given)  # type: ignore[arg-type]  # it checks them all


@app.command()
def sweep(
    hosts: Annotated[int, typer.Option(help="Of the lab, with a rank on each: 2 to 64.")] = 4,
    rates: Annotated[str, typer.Option(help="Of each host's line, separated by commas.")] = "100mbit,400mbit,1gbit",
    delays: Annotated[
        str, typer.Option(help="From host to host, one way, separated by commas: a round trip takes twice.")
    ] = "0ms,20ms",
    losses: Annotated[str, typer.Option(help="Fractions of all packets, separated by commas.")] = "0,0.01,0.1",
    burst: Burst = None,
    queue: Queue = None,
    mb: Annotated[float | None, typer.Option(help="Size of the tensor in MB, in place of --ideal-s.")] = None,
    ideal_s: Annotated[float, typer.Option(help="A tensor so large that its ideal takes so many seconds.")] = 0.6,
    iters: Annotated[int, typer.Option(help="Timed rounds per point.")] = 5,
    warmup: Warmup = _LAB_WARMUP,
    backends: Backends = _LAB_BACKENDS,
    seed: Annotated[int, typer.Option(help="Of the loss.")] = 0,
    patience_s: Patience = 30.0,
    json: Json = None,
    plot: Plot = None,
    timeout_s: Annotated[float, typer.Option(help="Give up a point after so many seconds.")] = 600.0,
) -> None:
    """Time the all-reduce at every combination of rate, delay and loss, in labs.

    All backends meet the same loss and take turns within every round.
    A point that fails is recorded with its error; Ctrl-C keeps the points that were measured.

    [bold]Examples[/bold]

      stormtorch bench sweep --json sweep.json --plot sweep.png

      stormtorch bench sweep --rates 400mbit --delays 0ms --losses 0,0.001,0.01,0.05,0.1,0.2 --mb 25

      stormtorch bench sweep --rates 100mbit --delays 10ms,20ms,50ms --patience 60
    """
    with friendly_errors():
        from stormtorch.bench.display import progress_bar
        from stormtorch.bench.plot import check_plot
        from stormtorch.bench.plot_sweep import plot_sweep
        from stormtorch.bench.sweep import SweepReport, SweepSettings, run_sweep
        from stormtorch.bench.tables import sweep_table

        settings = SweepSettings(
            hosts=hosts,
            rates=names(rates),
            delays=names(delays),
            losses=numbers("losses", losses),
            burst=burst or 1.0,
            queue=queue or "512kb",
            mb=mb,
            ideal_s=ideal_s,
            iters=iters,
            warmup=warmup,
            backends=names(backends),
            seed=seed,
            patience_s=patience_s,
            timeout_s=timeout_s,
        )
        check_file("json", json)
        if plot is not None:
            check_plot(plot)
            check_file("plot", plot)
        report = SweepReport.begin(settings)
        try:
            with progress_bar(iters * len(settings.points()), "making a lab") as advance:
                for point in run_sweep(settings, advance):
                    report.points.append(point)
                    if json is not None:
                        report.write(json)  # each point as soon as it is there: whatever ends a sweep, they are kept
        finally:
            if report.points:
                Console().print(sweep_table(report))
                if plot is not None:
                    plot_sweep(report, plot)


@app.command()
def latency(
    hosts: Hosts = 2,
    iters: Annotated[int, typer.Option(help="Timed rounds per size.")] = 200,
    warmup: Warmup = 20,
    backends: Backends = _BACKENDS,
    idle_s: Annotated[float, typer.Option(help="Seconds to watch an idle transport.")] = 3.0,
    json: Json = None,
    timeout_s: Timeout = 600.0,
) -> None:
    """Time the all-reduce of small tensors, 1 KB to 1 MB.

    Also an exchange of empty messages, and the CPU use of a connected transport that idles.

    [bold]Examples[/bold]

      stormtorch bench latency

      stormtorch bench latency --hosts 4 --iters 1000 --json latency.json
    """
    with friendly_errors():
        from stormtorch.bench.display import progress_bar
        from stormtorch.bench.latency import SIZES_BYTES, LatencySettings, latency_table, run_latency

        settings = LatencySettings(
            hosts=hosts, iters=iters, warmup=warmup, backends=names(backends), idle_s=idle_s, timeout_s=timeout_s
        )
        check_file("json", json)
        with progress_bar(iters * len(SIZES_BYTES), f"starting {hosts} processes") as advance:
            report = run_latency(settings, advance)
        Console().print(latency_table(report))
        if json is not None:
            report.write(json)


@app.command()
def manners(
    only: Annotated[str, typer.Option(help="Which to look at, separated by commas.")] = _MANNERS,
    rate: Annotated[str, typer.Option(help="Of each host's line; the engine is not told.")] = "200mbit",
    queue: Annotated[str, typer.Option(help="What may wait at each end of a line.")] = "256kb",
    delay: Annotated[str, typer.Option(help="From host to host, one way.")] = "0ms",
    hosts: Annotated[int, typer.Option(help="For all-to-all and incast; step has twice as many.")] = 4,
    tcp: Annotated[str, typer.Option(help="Congestion controls of the flow beside it.")] = "cubic,bbr",
    json: Json = None,
    timeout_s: Annotated[float, typer.Option(help="Give up one of them after so many seconds.")] = 300.0,
) -> None:
    """Look at how the engine behaves on a network that it does not know, with no rate given.

    Whether it floods queues (all-to-all, incast), leaves a bulk TCP flow its share (tcp),
    gets out of its way with rate="low" (low), and how fast it follows a change (step).

    [bold]Examples[/bold]

      stormtorch bench manners

      stormtorch bench manners --only incast --queue 64kb --hosts 8
    """
    with friendly_errors():
        from stormtorch.bench.display import progress_bar
        from stormtorch.bench.manners import MannersSettings, manners_table, run_manners

        settings = MannersSettings(
            only=names(only), rate=rate, queue=queue, delay=delay, hosts=hosts, tcp=names(tcp), timeout_s=timeout_s
        )
        check_file("json", json)
        with progress_bar(len(settings.only), "making a lab") as advance:
            report = run_manners(settings, advance)
        Console().print(manners_table(report))
        if json is not None:
            report.write(json)

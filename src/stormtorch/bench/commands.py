"""The commands of `stormtorch bench`: they check what was typed, show progress and tables; others do the work."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from stormtorch.console import check_file, friendly_errors, names, numbers

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")

# Declared here, so that --help answers without importing torch; a test compares them with the real ones.
_BACKENDS = "storm,storm-lossy,gloo"


class Dtype(StrEnum):
    """What can be summed."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


Hosts = Annotated[int, typer.Option(help="Ranks, each a process of this machine: 2 to 64.")]
Warmup = Annotated[int, typer.Option(help="Rounds before the timed ones; their results are checked.")]
Backends = Annotated[str, typer.Option(help="Which to compare, separated by commas.")]
Json = Annotated[Path | None, typer.Option(help="Write conditions and results to this file.", dir_okay=False)]
Timeout = Annotated[float, typer.Option(help="Give up after so many seconds in all.")]


@app.command()
def allreduce(
    hosts: Hosts = 2,
    mb: Annotated[str, typer.Option(help="Sizes of the tensor in MB (10^6 bytes), separated by commas.")] = "25",
    iters: Annotated[int, typer.Option(help="Timed rounds per size.")] = 20,
    warmup: Warmup = 3,
    backends: Backends = _BACKENDS,
    loss: Annotated[
        float, typer.Option(help="Fraction of the storm backends' datagrams to lose: 0 to 0.9. gloo cannot feel it.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the loss: the same seed loses the same datagrams.")] = 0,
    dtype: Annotated[Dtype, typer.Option(help="Of the tensor.")] = Dtype.float32,
    datagram_bytes: Annotated[
        int | None,
        typer.Option(help="Payload of a datagram, 256 to 65507: 1472 is Ethernet's. Default: what loopback can take."),
    ] = None,
    json: Json = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the times into this .png, .svg or .pdf; needs matplotlib.", dir_okay=False)
    ] = None,
    timeout_s: Timeout = 600.0,
) -> None:
    """Time the all-reduce of large tensors between processes of this machine.

    The backends take turns within every round.
    A time is that of the slowest rank; "x gloo" and "x ideal" are ratios of medians.
    Ideal is what this machine needs just to copy as many bytes in and out.

    [bold]Examples[/bold]

      stormtorch bench allreduce --hosts 4 --mb 25,100 --json out.json

      stormtorch bench allreduce --loss 0.01 --datagram-bytes 1472 --plot out.png

      stormtorch bench allreduce --backends storm,gloo --iters 100
    """
    with friendly_errors():
        from stormtorch.bench.allreduce import AllReduceSettings, allreduce_table, run_allreduce
        from stormtorch.bench.plot import check_plot, plot_allreduce

        settings = AllReduceSettings(
            hosts=hosts,
            mb=numbers("mb", mb),
            iters=iters,
            warmup=warmup,
            backends=names(backends),
            loss=loss,
            seed=seed,
            dtype=dtype.value,
            datagram_bytes=datagram_bytes,
            timeout_s=timeout_s,
        )
        check_file("json", json)
        if plot is not None:
            check_plot(plot)
            check_file("plot", plot)
        from stormtorch.bench.display import progress_bar

        with progress_bar(iters * len(settings.mb), f"starting {hosts} processes") as advance:
            report = run_allreduce(settings, advance)
        Console().print(allreduce_table(report))
        if json is not None:
            report.write(json)
        if plot is not None:
            plot_allreduce(report, plot)


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

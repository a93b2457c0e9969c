"""The commands `stormtorch bench allreduce`, `sweep`, `latency` and `manners`: options, progress and tables."""

from typing import Annotated

import typer
from rich.console import Console

from stormtorch.cli.console import check_outputs, friendly_errors, names, numbers, save
from stormtorch.cli.terminal.completion import complete_choice_list
from stormtorch.cli.terminal.help_layout import App
from stormtorch.cli.terminal.options import Json, Plot
from stormtorch_lab.cli.benches import colocate, steps, suite, virtual
from stormtorch_lab.cli.networks import lab_network, typed_burst, with_links
from stormtorch_lab.cli.terminal.choices import BACKENDS, FAIRNESS_CHECKS, LAB_BACKENDS, LAB_WARMUP, WARMUP, Dtype
from stormtorch_lab.cli.terminal.options import (
    Backends,
    BackendsAnywhere,
    Cable,
    Delay,
    Iters,
    Jitter,
    LabBurst,
    LabLoss,
    PerLink,
    Queue,
    Ranks,
    Rate,
    Seed,
    Tcp,
    Timeout,
    WaitLimit,
    Warmup,
    WarmupAnywhere,
)

app = App()
app.command("all")(suite.all_parts)
app.command()(steps.ddp)
app.command()(steps.convergence)
app.command()(colocate.colocate)
app.command()(virtual.colocate_virtual)


@app.command()
def allreduce(
    ranks: Ranks = 2,
    mb: Annotated[str, typer.Option(help="Sizes of the tensor in MB (10^6 bytes), separated by commas.")] = "25",
    iters: Iters = 20,
    warmup: WarmupAnywhere = None,
    backends: BackendsAnywhere = None,
    faults: Annotated[
        float,
        typer.Option(
            help="On loopback: fraction of storm's datagrams to drop, 0 to 0.9. gloo's packets are not affected."
        ),
    ] = 0.0,
    seed: Seed = 0,
    dtype: Annotated[Dtype, typer.Option(help="Number format of the tensor.")] = Dtype.float32,
    datagram_bytes: Annotated[
        int | None,
        typer.Option(
            help="Payload of a datagram, 256 to 65507: 1472 is Ethernet's.", show_default="what the network takes"
        ),
    ] = None,
    json: Json = None,
    plot: Plot = None,
    timeout_s: Timeout = 600.0,
    rate: Rate = None,
    loss: LabLoss = None,
    burst: LabBurst = None,
    delay: Delay = None,
    jitter: Jitter = None,
    queue: Queue = None,
    tcp: Tcp = None,
    per_link: PerLink = None,
    cable: Cable = None,
    patience_s: WaitLimit = 30.0,
    ranks_per_host: Annotated[
        int,
        typer.Option(
            help="In a lab: how many of the --ranks run on each host. storm-flat does not use this hierarchy."
        ),
    ] = 1,
) -> None:
    """Time the all-reduce of large tensors against gloo.

    Without an option of the lab, it runs on loopback, between processes of this machine.
    With any of them, it runs on virtual hosts of a lab, whose network drops packets of all backends alike.
    The backends alternate within every round.
    A time is that of the slowest rank; "x gloo" (the first one) and "x ideal" are ratios of medians.
    Ideal is the time at the rate of the links; on loopback and by cable, the time that this machine needs to copy as
    many bytes in and out.
    Gbit/s is the data that each rank must send, over the median time. CPU s/GB is processor time of all ranks per GB of
    the tensor.

    [bold]Examples[/bold]

      stormtorch bench allreduce --ranks 4 --mb 25,100 --json out.json
      stormtorch bench allreduce --ranks 4 --rate 400mbit --loss 0.1
      stormtorch bench allreduce --ranks 4 --rate 100mbit --delay 20ms --mb 5 --loss 0.01 --burst 8
      stormtorch bench allreduce --ranks 4 --rate 100mbit --mb 5 --loss 0.1 --burst 5ms
      stormtorch bench allreduce --rate 50mbit --mb 5 --per-link links.json
      stormtorch bench allreduce --ranks 8 --ranks-per-host 2 --rate 400mbit --backends storm,storm-flat
      stormtorch bench allreduce --cable 9000 --mb 25,100
      stormtorch bench allreduce --ranks 2 --backends gloo,storm,storm-one-lane --mb 100
      stormtorch bench allreduce --faults 0.01 --datagram-bytes 1472 --plot out.png
    """
    with friendly_errors():
        from stormtorch.cli.terminal.screen import progress_bar
        from stormtorch_lab.bench.allreduce import AllReduceSettings, run_allreduce
        from stormtorch_lab.cli.plots.bench import plot_allreduce
        from stormtorch_lab.cli.tables.bench import allreduce_table

        network = lab_network(
            seed,
            rate=rate,
            loss=loss,
            burst=burst,
            delay=delay,
            jitter=jitter,
            queue=queue,
            tcp=tcp,
            cable=cable,
        )
        network = with_links(network, per_link, ranks // max(ranks_per_host, 1))
        lossless = network is None or cable is not None
        settings = AllReduceSettings(
            ranks=ranks,
            ranks_per_host=ranks_per_host,
            mb=numbers("mb", mb),
            iters=iters,
            warmup=warmup if warmup is not None else (WARMUP if lossless else LAB_WARMUP),
            backends=names(backends or (BACKENDS if lossless else LAB_BACKENDS)),
            network=network,
            faults=faults,
            seed=seed,
            dtype=dtype.value,
            datagram_bytes=datagram_bytes,
            patience_s=patience_s,
            timeout_s=timeout_s,
        )
        check_outputs(json, plot)
        with progress_bar(iters * len(settings.mb), f"starting {ranks} processes") as advance:
            report = run_allreduce(settings, advance)
        Console().print(allreduce_table(report))
        save(report.write, json)
        save(lambda path: plot_allreduce(report, path), plot)


@app.command()
def sweep(
    ranks: Ranks = 4,
    rates: Annotated[
        str, typer.Option(help="Rates of each host's access link, separated by commas.")
    ] = "100mbit,400mbit,1gbit",
    delays: Annotated[
        str,
        typer.Option(help="One-way delays between hosts, separated by commas: a round trip takes twice as long."),
    ] = "0ms,20ms",
    losses: Annotated[str, typer.Option(help="Fractions of all packets to drop, separated by commas.")] = "0,0.01,0.1",
    bursts: Annotated[
        str,
        typer.Option(help="Mean lengths of runs of losses, separated by commas, in packets or in time: 1,20,5ms."),
    ] = "1",
    queue: Queue = None,
    mb: Annotated[float | None, typer.Option(help="Size of the tensor in MB, in place of --ideal-s.")] = None,
    ideal_s: Annotated[
        float, typer.Option(help="Choose the size of the tensor so that its ideal time is this many seconds.")
    ] = 0.6,
    iters: Iters = 5,
    warmup: Warmup = LAB_WARMUP,
    backends: Backends = LAB_BACKENDS,
    seed: Seed = 0,
    patience_s: WaitLimit = 30.0,
    json: Json = None,
    plot: Plot = None,
    timeout_s: Annotated[float, typer.Option(help="Abort a point after so many seconds.")] = 600.0,
) -> None:
    """Time the all-reduce at every combination of rate, delay, loss and length of bursts, in labs.

    All backends see the same loss and alternate within every round.
    A point that fails is recorded with its error; Ctrl-C keeps the points that were measured.

    [bold]Examples[/bold]

      stormtorch bench sweep --json sweep.json --plot sweep.png
      stormtorch bench sweep --rates 400mbit --delays 0ms --losses 0,0.001,0.01,0.05,0.1,0.2 --mb 25
      stormtorch bench sweep --rates 100mbit --delays 10ms,20ms,50ms --patience-s 60
      stormtorch bench sweep --losses 0.05,0.1,0.2 --bursts 8,20,64,5ms --backends storm,storm-lossy
    """
    with friendly_errors():
        from stormtorch.cli.terminal.screen import progress_bar
        from stormtorch_lab.bench.sweep import SweepReport, SweepSettings, run_sweep
        from stormtorch_lab.cli.plots.sweep import plot_sweep
        from stormtorch_lab.cli.tables.bench import sweep_table

        settings = SweepSettings(
            ranks=ranks,
            rates=names(rates),
            delays=names(delays),
            losses=numbers("losses", losses),
            bursts=tuple(typed_burst(burst) for burst in names(bursts)),
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
        check_outputs(json, plot)
        report = SweepReport.begin(settings)
        try:
            with progress_bar(iters * len(settings.points()), "making a lab") as advance:
                for point in run_sweep(settings, advance):
                    report.points.append(point)
                    save(report.write, json)  # after every point, so that an interrupted sweep keeps its results
        finally:
            if report.points:
                Console().print(sweep_table(report))
                save(lambda path: plot_sweep(report, path), plot)


@app.command()
def latency(
    ranks: Ranks = 2,
    iters: Iters = 200,
    warmup: Warmup = 20,
    backends: Backends = BACKENDS,
    idle_s: Annotated[float, typer.Option(help="Seconds to watch an idle transport.")] = 3.0,
    json: Json = None,
    timeout_s: Timeout = 600.0,
) -> None:
    """Time the all-reduce of small tensors, 1 KB to 1 MB.

    It also times an exchange of empty messages, and measures the CPU use of an idle connected transport.

    [bold]Examples[/bold]

      stormtorch bench latency
      stormtorch bench latency --ranks 4 --iters 1000 --json latency.json
    """
    with friendly_errors():
        from stormtorch.cli.terminal.screen import progress_bar
        from stormtorch_lab.bench.latency import SIZES_BYTES, LatencySettings, run_latency
        from stormtorch_lab.cli.tables.bench import latency_table

        settings = LatencySettings(
            ranks=ranks, iters=iters, warmup=warmup, backends=names(backends), idle_s=idle_s, timeout_s=timeout_s
        )
        check_outputs(json)
        with progress_bar(iters * len(SIZES_BYTES), f"starting {ranks} processes") as advance:
            report = run_latency(settings, advance)
        Console().print(latency_table(report))
        save(report.write, json)


@app.command()
def manners(
    only: Annotated[
        str,
        typer.Option(help="Checks to run, separated by commas.", autocompletion=complete_choice_list(FAIRNESS_CHECKS)),
    ] = FAIRNESS_CHECKS,
    rate: Annotated[
        str, typer.Option(help="Rate of each host's access link; the engine does not know it.")
    ] = "200mbit",
    queue: Annotated[str, typer.Option(help="Bytes of the queue at each end of an access link.")] = "256kb",
    delay: Annotated[str, typer.Option(help="One-way delay between hosts.")] = "0ms",
    ranks: Annotated[int, typer.Option(help="Ranks for all-to-all and incast; step has twice as many: 3 to 16.")] = 4,
    tcp: Annotated[
        str,
        typer.Option(
            help="Congestion controls of the competing TCP flow.", autocompletion=complete_choice_list("cubic,bbr,reno")
        ),
    ] = "cubic,bbr",
    json: Json = None,
    timeout_s: Annotated[float, typer.Option(help="Abort a check after so many seconds.")] = 300.0,
) -> None:
    """Check how the engine's congestion control behaves on an unknown network, with no rate given.

    It measures whether the engine floods queues (all-to-all, incast), leaves a bulk TCP flow its share (tcp), and
    yields to it at low priority (low, latency); what low priority costs on an idle network (alone); how soon the engine
    regains the link when other flows pause (pause); and how fast it follows a change of the network (step).

    [bold]Examples[/bold]

      stormtorch bench manners
      stormtorch bench manners --only incast --queue 64kb --ranks 8
    """
    with friendly_errors():
        from stormtorch.cli.terminal.screen import progress_bar
        from stormtorch_lab.bench.sharing.fairness import run_fairness
        from stormtorch_lab.bench.sharing.fairness_results import FairnessSettings
        from stormtorch_lab.cli.tables.bench import fairness_table

        settings = FairnessSettings(
            only=names(only), rate=rate, queue=queue, delay=delay, ranks=ranks, tcp=names(tcp), timeout_s=timeout_s
        )
        check_outputs(json)
        with progress_bar(len(settings.only), "making a lab") as advance:
            report = run_fairness(settings, advance)
        Console().print(fairness_table(report))
        save(report.write, json)

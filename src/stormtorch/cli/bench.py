"""The commands of `stormtorch bench`: they check what was typed, show progress and tables; others do the work."""

from typing import Annotated

import typer
from rich.console import Console

from stormtorch.cli.console import friendly_errors, names, numbers, save
from stormtorch.cli.options import (
    BACKENDS,
    DDP_BACKENDS,
    LAB_BACKENDS,
    LAB_DDP_BACKENDS,
    LAB_LEARNERS,
    LAB_PARAMS,
    LAB_WARMUP,
    LEARNERS,
    MANNERS,
    PARAMS,
    Backends,
    BackendsAnywhere,
    Burst,
    DdpBackends,
    Delay,
    Dtype,
    Hosts,
    Jitter,
    Json,
    Loss,
    Patience,
    Plot,
    Queue,
    Rate,
    Seed,
    Tcp,
    Timeout,
    Warmup,
    WarmupAnywhere,
    Wires,
    backends_of,
    check_outputs,
    network_of,
    warmup_of,
)

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")


@app.command()
def allreduce(
    hosts: Hosts = 2,
    mb: Annotated[str, typer.Option(help="Sizes of the tensor in MB (10^6 bytes), separated by commas.")] = "25",
    iters: Annotated[int, typer.Option(help="Timed rounds per size.")] = 20,
    warmup: WarmupAnywhere = None,
    backends: BackendsAnywhere = None,
    faults: Annotated[
        float,
        typer.Option(help="On loopback: fraction of storm's datagrams to lose, 0 to 0.9. gloo cannot feel it."),
    ] = 0.0,
    seed: Seed = 0,
    dtype: Annotated[Dtype, typer.Option(help="Of the tensor.")] = Dtype.float32,
    datagram_bytes: Annotated[
        int | None,
        typer.Option(help="Payload of a datagram, 256 to 65507: 1472 is Ethernet's. Default: what the network takes."),
    ] = None,
    json: Json = None,
    plot: Plot = None,
    timeout_s: Timeout = 600.0,
    rate: Rate = None,
    loss: Loss = None,
    burst: Burst = None,
    delay: Delay = None,
    jitter: Jitter = None,
    queue: Queue = None,
    tcp: Tcp = None,
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
        from stormtorch.cli.plots.bench import plot_allreduce
        from stormtorch.cli.screen import progress_bar
        from stormtorch.cli.tables.bench import allreduce_table

        network = network_of(seed, rate=rate, loss=loss, burst=burst, delay=delay, jitter=jitter, queue=queue, tcp=tcp)
        settings = AllReduceSettings(
            hosts=hosts,
            mb=numbers("mb", mb),
            iters=iters,
            warmup=warmup_of(warmup, network),
            backends=backends_of(backends, network),
            network=network,
            faults=faults,
            seed=seed,
            dtype=dtype.value,
            datagram_bytes=datagram_bytes,
            patience_s=patience_s,
            timeout_s=timeout_s,
        )
        check_outputs(json, plot)
        with progress_bar(iters * len(settings.mb), f"starting {hosts} processes") as advance:
            report = run_allreduce(settings, advance)
        Console().print(allreduce_table(report))
        save(report.write, json)
        save(lambda path: plot_allreduce(report, path), plot)


@app.command()
def ddp(
    hosts: Hosts = 4,
    params: Annotated[
        float | None,
        typer.Option(
            "--params",
            "--params-m",
            help="Of the model, in millions: 0.01 to 1000, about.",
            show_default=f"{PARAMS:g}; in a lab {LAB_PARAMS:g}",
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option(help="That each rank learns from in a step; more of them hide more of the communication.")
    ] = 16,
    iters: Annotated[int, typer.Option(help="Timed rounds.")] = 20,
    steps: Annotated[
        int, typer.Option(help="In a turn of a round, without a barrier between them; times are per step.")
    ] = 1,
    warmup: WarmupAnywhere = None,
    backends: DdpBackends = None,
    wires: Wires = "float32",
    device: Annotated[str, typer.Option(help="Where the model is: cpu, or cuda, where all ranks share a GPU.")] = "cpu",
    seed: Seed = 0,
    json: Json = None,
    plot: Plot = None,
    timeout_s: Timeout = 600.0,
    rate: Rate = None,
    loss: Loss = None,
    burst: Burst = None,
    delay: Delay = None,
    jitter: Jitter = None,
    queue: Queue = None,
    tcp: Tcp = None,
    patience_s: Patience = 30.0,
) -> None:
    """Time a training step under DistributedDataParallel and under prepare(), beside gloo.

    A small transformer with few tokens, so that a step is mostly communication; each backend has a copy.
    storm is exact; storm-lossy is storm with the hook of LossyGradients; no_sync is a step without communication.
    storm-drift is prepared for BoundedDrift: gradients and parameters may be lost, and replicas differ a little.
    On loopback as long as no option of a lab is given; with any of them, on virtual hosts of a lab.
    The backends take turns within every round; a time is that of the slowest rank.
    In the first step, gradients are checked against the mean; in the warm-up, for being the same on every rank.

    [bold]Examples[/bold]

      stormtorch bench ddp

      stormtorch bench ddp --hosts 4 --params 25 --json ddp.json --plot ddp.png

      stormtorch bench ddp --rate 400mbit --loss 0.1 --iters 5

      stormtorch bench ddp --rate 1gbit --loss 0.01 --backends storm,gloo-bbr --params 100

      stormtorch bench ddp --rate 400mbit --loss 0.1 --wires float32,bfloat16,int8 --steps 4
    """
    with friendly_errors():
        from stormtorch.bench.ddp import DdpSettings, run_ddp
        from stormtorch.cli.plots.bench import plot_ddp
        from stormtorch.cli.screen import progress_bar
        from stormtorch.cli.tables.steps import ddp_table

        network = network_of(seed, rate=rate, loss=loss, burst=burst, delay=delay, jitter=jitter, queue=queue, tcp=tcp)
        settings = DdpSettings(
            hosts=hosts,
            params=params if params is not None else (PARAMS if network is None else LAB_PARAMS),
            tokens=tokens,
            iters=iters,
            steps=steps,
            warmup=warmup_of(warmup, network),
            backends=backends_of(backends, network, DDP_BACKENDS, LAB_DDP_BACKENDS),
            wires=names(wires),
            device=device,
            network=network,
            patience_s=patience_s,
            timeout_s=timeout_s,
        )
        check_outputs(json, plot)
        with progress_bar(iters, f"starting {hosts} processes") as advance:
            report = run_ddp(settings, advance)
        Console().print(ddp_table(report))
        save(report.write, json)
        save(lambda path: plot_ddp(report, path), plot)


@app.command()
def convergence(
    hosts: Hosts = 4,
    seconds: Annotated[float, typer.Option(help="Of training for each backend, by the clock.")] = 60.0,
    every_s: Annotated[
        float | None,
        typer.Option(
            help="Seconds of training between evaluations, which stop the clock.", show_default="a twentieth of all"
        ),
    ] = None,
    layers: Annotated[int, typer.Option(help="Of the model.")] = 4,
    width: Annotated[
        int, typer.Option(help="Of the model, a multiple of 64: 4 layers of 256 have 3.2 M parameters.")
    ] = 256,
    batch: Annotated[int, typer.Option(help="Sequences that each rank learns from in a step.")] = 4,
    context: Annotated[int, typer.Option(help="Bytes of a sequence.")] = 64,
    lr: Annotated[float, typer.Option(help="Learning rate of AdamW.")] = 1e-3,
    backends: Annotated[
        str | None,
        typer.Option(
            help="Which to compare, separated by commas: any of `bench ddp`.",
            show_default=f"{LEARNERS}; in a lab {LAB_LEARNERS}",
        ),
    ] = None,
    wires: Wires = "float32,bfloat16",
    seed: Annotated[int, typer.Option(help="Of weights, batches and loss.")] = 0,
    json: Json = None,
    plot: Plot = None,
    timeout_s: Annotated[float, typer.Option(help="Give up a backend after so many seconds in all.")] = 600.0,
    rate: Rate = None,
    loss: Loss = None,
    burst: Burst = None,
    delay: Delay = None,
    jitter: Jitter = None,
    queue: Queue = None,
    tcp: Tcp = None,
    patience_s: Annotated[
        float,
        typer.Option(
            "--patience-s",
            "--patience",
            help="Give up a backend over TCP when no evaluation has come for so many seconds.",
            rich_help_panel="In a lab",
        ),
    ] = 60.0,
) -> None:
    """Train a small language model and see who comes to the same validation loss first.

    A LLaMA reads the bytes of Python's standard library, with AdamW; one backend after the other, from the same
    weights and with the same batches. Validation loss is told against the seconds of training.
    On loopback as long as no option of a lab is given; with any of them, on virtual hosts of a lab.
    Ctrl-C keeps the backends that were measured.

    [bold]Examples[/bold]

      stormtorch bench convergence --seconds 20

      stormtorch bench convergence --rate 400mbit --loss 0.1 --json learning.json --plot learning.png

      stormtorch bench convergence --rate 100mbit --loss 0.01 --backends gloo-cubic,storm,storm-drift --wires int8
    """
    with friendly_errors():
        from stormtorch.bench.convergence import ConvergenceReport, ConvergenceSettings, run_convergence
        from stormtorch.cli.plots.convergence import plot_convergence
        from stormtorch.cli.screen import progress_bar
        from stormtorch.cli.tables.steps import convergence_table

        network = network_of(seed, rate=rate, loss=loss, burst=burst, delay=delay, jitter=jitter, queue=queue, tcp=tcp)
        settings = ConvergenceSettings(
            hosts=hosts,
            seconds=seconds,
            every_s=every_s if every_s is not None else seconds / 20,
            layers=layers,
            width=width,
            batch=batch,
            context=context,
            lr=lr,
            seed=seed,
            backends=backends_of(backends, network, LEARNERS, LAB_LEARNERS),
            wires=names(wires),
            network=network,
            patience_s=patience_s,
            timeout_s=timeout_s,
        )
        check_outputs(json, plot)
        report = ConvergenceReport.begin(settings)
        try:
            total = round(seconds * len(settings.contenders))
            with progress_bar(total, f"starting {hosts} processes", unit="s") as advance:
                for curve in run_convergence(settings, advance):
                    report.curves.append(curve)
                    save(report.write, json)  # each as soon as it is there: whatever ends the command, they are kept
        finally:
            if report.curves:
                Console().print(convergence_table(report))
                save(lambda path: plot_convergence(report, path), plot)


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
    warmup: Warmup = LAB_WARMUP,
    backends: Backends = LAB_BACKENDS,
    seed: Seed = 0,
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
        from stormtorch.bench.sweep import SweepReport, SweepSettings, run_sweep
        from stormtorch.cli.plots.sweep import plot_sweep
        from stormtorch.cli.screen import progress_bar
        from stormtorch.cli.tables.bench import sweep_table

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
        check_outputs(json, plot)
        report = SweepReport.begin(settings)
        try:
            with progress_bar(iters * len(settings.points()), "making a lab") as advance:
                for point in run_sweep(settings, advance):
                    report.points.append(point)
                    save(report.write, json)  # each point as soon as it is there: whatever ends a sweep, they are kept
        finally:
            if report.points:
                Console().print(sweep_table(report))
                save(lambda path: plot_sweep(report, path), plot)


@app.command()
def latency(
    hosts: Hosts = 2,
    iters: Annotated[int, typer.Option(help="Timed rounds per size.")] = 200,
    warmup: Warmup = 20,
    backends: Backends = BACKENDS,
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
        from stormtorch.bench.latency import SIZES_BYTES, LatencySettings, run_latency
        from stormtorch.cli.screen import progress_bar
        from stormtorch.cli.tables.bench import latency_table

        settings = LatencySettings(
            hosts=hosts, iters=iters, warmup=warmup, backends=names(backends), idle_s=idle_s, timeout_s=timeout_s
        )
        check_outputs(json)
        with progress_bar(iters * len(SIZES_BYTES), f"starting {hosts} processes") as advance:
            report = run_latency(settings, advance)
        Console().print(latency_table(report))
        save(report.write, json)


@app.command()
def manners(
    only: Annotated[str, typer.Option(help="Which to look at, separated by commas.")] = MANNERS,
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
        from stormtorch.bench.manners import MannersSettings, run_manners
        from stormtorch.cli.screen import progress_bar
        from stormtorch.cli.tables.bench import manners_table

        settings = MannersSettings(
            only=names(only), rate=rate, queue=queue, delay=delay, hosts=hosts, tcp=names(tcp), timeout_s=timeout_s
        )
        check_outputs(json)
        with progress_bar(len(settings.only), "making a lab") as advance:
            report = run_manners(settings, advance)
        Console().print(manners_table(report))
        save(report.write, json)

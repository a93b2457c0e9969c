"""The commands `stormtorch bench ddp` and `convergence`: options, progress and tables."""

from typing import Annotated

import typer
from rich.console import Console

from stormtorch.cli.console import check_outputs, friendly_errors, names, save
from stormtorch.cli.terminal.completion import complete_choice
from stormtorch.cli.terminal.options import Json, Plot
from stormtorch_lab.cli.networks import lab_network, with_links
from stormtorch_lab.cli.terminal.choices import (
    DDP_BACKENDS,
    LAB_DDP_BACKENDS,
    LAB_LEARNERS,
    LAB_PARAMS_M,
    LAB_WARMUP,
    LEARNERS,
    PARAMS_M,
    POLICIES,
    WARMUP,
)
from stormtorch_lab.cli.terminal.options import (
    BackendsAnywhere,
    Batch,
    Context,
    Delay,
    Iters,
    Jitter,
    LabBurst,
    LabLoss,
    Layers,
    Learners,
    PerLink,
    Queue,
    Ranks,
    Rate,
    Seed,
    Set,
    Tcp,
    Timeout,
    WaitLimit,
    WarmupAnywhere,
    Wires,
)


def ddp(
    ranks: Ranks = 4,
    params_m: Annotated[
        float | None,
        typer.Option(
            help="Parameters of the model in millions, about: 0.01 to 1000.",
            show_default=f"{PARAMS_M:g}; in a lab {LAB_PARAMS_M:g}",
        ),
    ] = None,
    tokens: Annotated[
        int,
        typer.Option(help="Tokens of each rank per step; more tokens hide more of the communication."),
    ] = 16,
    iters: Iters = 20,
    steps: Annotated[
        int, typer.Option(help="Steps of a backend in each round, without a barrier between them; times are per step.")
    ] = 1,
    warmup: WarmupAnywhere = None,
    backends: BackendsAnywhere = None,
    wire: Wires = "float32",
    device: Annotated[
        str,
        typer.Option(
            help="Device of the model: cpu, or cuda, where all ranks share a GPU.",
            autocompletion=complete_choice("cpu,cuda"),
        ),
    ] = "cpu",
    seed: Seed = 0,
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
    patience_s: WaitLimit = 30.0,
    ranks_per_host: Annotated[
        int,
        typer.Option(
            help="In a lab: how many of the --ranks run on each host. storm-drift-flat does not use this hierarchy."
        ),
    ] = 1,
) -> None:
    """Time a training step under DistributedDataParallel and under prepare(), against gloo.

    The model is a small transformer with few tokens, so that a step is mostly communication.
    Each backend has a copy of it.
    storm is exact; storm-lossy is storm with the hook of LossyGradients; no_sync is a step without communication.
    storm-drift is prepared for BoundedDrift: gradients and parameters may be lost, and replicas differ a little.
    storm-alone is storm-drift without standbys; the difference is what standbys cost.
    In a lab, storm-drift-rate is storm-drift with shards in proportion to the rates of the links (see --per-link).
    Without an option of the lab, it runs on loopback; with any of them, on virtual hosts of a lab.
    The backends alternate within every round; a time is that of the slowest rank.
    The first step checks the gradients against their mean; the warm-up checks that they are equal on all ranks.

    [bold]Examples[/bold]

      stormtorch bench ddp
      stormtorch bench ddp --ranks 4 --params-m 25 --json ddp.json --plot ddp.png
      stormtorch bench ddp --rate 400mbit --loss 0.1 --iters 5
      stormtorch bench ddp --rate 1gbit --loss 0.01 --backends storm,gloo-bbr --params-m 100
      stormtorch bench ddp --rate 400mbit --loss 0.1 --wire float32,bfloat16,int8 --steps 4
      stormtorch bench ddp --ranks 8 --ranks-per-host 2 --rate 400mbit --backends storm-drift,storm-drift-flat
    """
    with friendly_errors():
        from stormtorch.cli.terminal.screen import progress_bar
        from stormtorch_lab.bench.ddp import DdpSettings, run_ddp
        from stormtorch_lab.cli.plots.bench import plot_ddp
        from stormtorch_lab.cli.tables.steps import ddp_table

        network = lab_network(seed, rate=rate, loss=loss, burst=burst, delay=delay, jitter=jitter, queue=queue, tcp=tcp)
        network = with_links(network, per_link, ranks // max(ranks_per_host, 1))
        settings = DdpSettings(
            ranks=ranks,
            ranks_per_host=ranks_per_host,
            params_m=params_m if params_m is not None else (PARAMS_M if network is None else LAB_PARAMS_M),
            tokens=tokens,
            iters=iters,
            steps=steps,
            warmup=warmup if warmup is not None else (WARMUP if network is None else LAB_WARMUP),
            backends=names(backends or (DDP_BACKENDS if network is None else LAB_DDP_BACKENDS)),
            wires=names(wire),
            device=device,
            network=network,
            patience_s=patience_s,
            timeout_s=timeout_s,
        )
        check_outputs(json, plot)
        with progress_bar(iters, f"starting {ranks} processes") as advance:
            report = run_ddp(settings, advance)
        Console().print(ddp_table(report))
        save(report.write, json)
        save(lambda path: plot_ddp(report, path), plot)


def convergence(
    ranks: Ranks = 4,
    seconds: Annotated[float, typer.Option(help="Seconds of training for each backend, by the clock.")] = 60.0,
    every_s: Annotated[
        float | None,
        typer.Option(
            help="Seconds of training between evaluations, which stop the clock.", show_default="a twentieth of all"
        ),
    ] = None,
    layers: Layers = 4,
    width: Annotated[
        int, typer.Option(help="Width of the model, a multiple of 64: 4 layers of 256 have 3.2 M parameters.")
    ] = 256,
    batch: Batch = 4,
    context: Context = 64,
    lr: Annotated[float, typer.Option(help="Constant learning rate of AdamW.")] = 1e-3,
    backends: Learners = None,
    wire: Wires = "float32,bfloat16",
    every: Annotated[
        int, typer.Option(help="Steps between two exchanges of models, for policies that exchange models.")
    ] = 30,
    more: Set = None,
    target: Annotated[
        float | None,
        typer.Option(
            help="Target loss in nats per byte; the times to reach it are compared.",
            show_default="the lowest that all reached",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed of weights, batches and packet loss.")] = 0,
    json: Json = None,
    plot: Plot = None,
    timeout_s: Annotated[float, typer.Option(help="Abort a backend after so many seconds in all.")] = 600.0,
    rate: Rate = None,
    loss: LabLoss = None,
    burst: LabBurst = None,
    delay: Delay = None,
    jitter: Jitter = None,
    queue: Queue = None,
    tcp: Tcp = None,
    patience_s: Annotated[
        float, typer.Option(help="Abort a backend over TCP that reports no evaluation for so many seconds.")
    ] = 60.0,
) -> None:
    """Train a small language model and measure which backend reaches the same validation loss first.

    A LLaMA learns the bytes of Python's standard library with AdamW. One backend trains after the other, from the same
    weights and with the same batches. The result is the validation loss over the seconds of training.
    Without an option of the lab, it runs on loopback; with any of them, on virtual hosts of a lab.
    Ctrl-C keeps the backends that were measured.

    [bold]Examples[/bold]

      stormtorch bench convergence --seconds 20
      stormtorch bench convergence --rate 400mbit --loss 0.1 --json learning.json --plot learning.png
      stormtorch bench convergence --rate 100mbit --loss 0.01 --backends gloo-cubic,storm,storm-drift --wire int8
      stormtorch bench convergence --rate 20mbit --delay 50ms --loss 0.05 --backends gloo-bbr,diloco,streaming-diloco
    """
    with friendly_errors():
        from stormtorch.cli.terminal.screen import progress_bar
        from stormtorch_lab.bench.convergence import ConvergenceReport, ConvergenceSettings
        from stormtorch_lab.bench.learning import run_convergence
        from stormtorch_lab.cli.plots.convergence import plot_convergence
        from stormtorch_lab.cli.policies import fields_of
        from stormtorch_lab.cli.tables.steps import convergence_table
        from stormtorch_lab.policies.presets import PolicySettings

        network = lab_network(seed, rate=rate, loss=loss, burst=burst, delay=delay, jitter=jitter, queue=queue, tcp=tcp)
        settings = ConvergenceSettings(
            ranks=ranks,
            seconds=seconds,
            every_s=every_s if every_s is not None else seconds / 20,
            layers=layers,
            width=width,
            batch=batch,
            context=context,
            lr=lr,
            seed=seed,
            backends=names(backends or (LEARNERS if network is None else LAB_LEARNERS)),
            wires=names(wire),
            policy=PolicySettings(
                every=every,
                more=fields_of(more, tuple(name for name in names(backends or "") if name in POLICIES.split(","))),
                given=frozenset({"every"}),
            ),
            target=target,
            network=network,
            patience_s=patience_s,
            timeout_s=timeout_s,
        )
        check_outputs(json, plot)
        report = ConvergenceReport.begin(settings)
        try:
            total = round(seconds * len(settings.contenders))
            with progress_bar(total, f"starting {ranks} processes", unit="s") as advance:
                for curve in run_convergence(settings, advance):
                    report.curves.append(curve)
                    save(report.write, json)  # after every backend, so that an interrupted command keeps its results
        finally:
            if report.curves:
                Console().print(convergence_table(report))
                save(lambda path: plot_convergence(report, path), plot)

"""The command `stormtorch simulate`: options, progress and table."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from stormtorch.cli.console import check_file, check_outputs, friendly_errors, names, save
from stormtorch.cli.terminal.options import Json, Plot
from stormtorch_lab.cli.networks import SimulatedNetworkOptions, burst_in_packets
from stormtorch_lab.cli.terminal.choices import SIMULATE_POLICIES, Device, How, Optimizer, Precision, Weights, Wire
from stormtorch_lab.cli.terminal.options import (
    AtOnce,
    Budget,
    BurstInPackets,
    Checkpoint,
    Data,
    Delivered,
    Deterministic,
    DeviceName,
    Every,
    FirstSeed,
    Fuse,
    GradientBudget,
    HowName,
    Lead,
    Ledger,
    LossBesideLinks,
    MaxLag,
    Model,
    OptimizerName,
    OwnBatch,
    OwnContext,
    OwnLayers,
    OwnLr,
    OwnWidth,
    PerLink,
    PolicyNames,
    PrecisionName,
    RedundancyText,
    Seeds,
    Set,
    Shared,
    Steps,
    Stragglers,
    TraceDrawn,
    WeightsName,
    WireName,
    Workers,
)

if TYPE_CHECKING:
    from stormtorch_lab.studies.settings import SimSettings


def simulate(
    command: typer.Context,
    workers: Workers = 64,
    steps: Steps = 200,
    seeds: Seeds = 1,
    first_seed: FirstSeed = 0,
    json: Json = None,
    plot: Plot = None,
    ledger: Ledger = None,
    checkpoint: Checkpoint = None,
    policy: PolicyNames = SIMULATE_POLICIES,
    wire: WireName = Wire.float32,
    budget: Budget = 1.0,
    gradient_budget: GradientBudget = None,
    lead: Lead = 1.0,
    weights: WeightsName = Weights.mean,
    redundancy: RedundancyText = "0",
    max_lag: MaxLag = None,
    every: Every = 1,
    more: Set = None,
    loss: LossBesideLinks = None,
    burst: BurstInPackets = "1",
    per_link: PerLink = None,
    trace: TraceDrawn = None,
    shared: Shared = None,
    stragglers: Stragglers = None,
    delivered: Delivered = None,
    model: Model = "llama",
    data: Data = None,
    batch: OwnBatch = None,
    lr: OwnLr = None,
    context: OwnContext = None,
    width: OwnWidth = None,
    layers: OwnLayers = None,
    optimizer: OptimizerName = Optimizer.task,
    device: DeviceName = Device.auto,
    precision: PrecisionName = Precision.float32,
    at_once: AtOnce = None,
    how: HowName = How.auto,
    fuse: Fuse = False,
    deterministic: Deterministic = False,
) -> None:
    """Train on many virtual workers in one process, over a simulated lossy network, and compare policies.

    Every worker has its own replica and computes gradients on it; the chunks that arrive are drawn for every link.
    Each policy begins with the same weights and sees the same batches, so differences come from packet loss alone.
    The table shows perplexity or accuracy, how far replicas drifted apart and how old their copies are.
    Time is not simulated: without --stragglers no chunk is late, and the time of a step is that of this machine.
    torchrun splits the workers over processes and GPUs.

    [bold]Examples[/bold]

      stormtorch simulate
      stormtorch simulate --loss 0.4 --policy lossless,plain,lead --seeds 3 --json out.json --plot out.png
      stormtorch simulate --loss 0.1 --burst 64 --policy lossless,plain
      stormtorch simulate --policy lossless,lead,my.py:MyPolicy
      stormtorch simulate --workers 8 --policy diloco,sparse-diloco --every 30 --steps 300
      stormtorch simulate --workers 16 --policy lossless,model-averaging --model resnet20
      stormtorch simulate --per-link links.json --checkpoint run
      torchrun --nproc-per-node 2 -m stormtorch.cli simulate --workers 1024
    """
    with friendly_errors(), _one_voice(checkpoint):
        from dataclasses import replace

        import torch

        from stormtorch_lab.cli.policies import fields_of, given, redundancy_of
        from stormtorch_lab.studies.settings import SimSettings

        length = burst_in_packets(burst)
        network = SimulatedNetworkOptions(
            workers=workers,
            first_seed=first_seed,
            loss=loss,
            burst=length,
            per_link=per_link,
            trace=trace,
            shared=shared,
            stragglers=stragglers,
            delivered=delivered,
        )
        # Built without a loss model first, so that errors in loss and burst carry those names.
        settings = SimSettings(
            workers=workers,
            steps=steps,
            seeds=seeds,
            first_seed=first_seed,
            policies=names(policy),
            wire=wire.value,
            budget=budget,
            gradient_budget=gradient_budget,
            lead=lead,
            weights=weights.value,
            redundancy=redundancy_of(redundancy),
            max_lag=max_lag,
            every=every,
            more=fields_of(more, names(policy)),
            given=given(command),
            loss=network.plain_loss,
            burst=length,
            model=model,
            data=data,
            batch=batch,
            lr=lr,
            context=context,
            width=width,
            layers=layers,
            optimizer=optimizer.value,
            device=("cuda" if torch.cuda.is_available() else "cpu") if device is Device.auto else device.value,
            precision=precision.value,
            at_once=at_once,
            how=how.value,
            fuse=fuse,
            deterministic=deterministic,
        )
        settings = replace(settings, network=network.model())
        check_outputs(json, plot)
        check_file("ledger", ledger)
        run(settings, json, plot, ledger, checkpoint)


@contextlib.contextmanager
def _one_voice(checkpoint: Path | None) -> Iterator[None]:
    """Lets only the first process of torchrun print errors, and how to resume after Ctrl-C."""
    from stormtorch.checks import BadSetting

    first = os.environ.get("RANK", "0") == "0"
    try:
        yield
    except KeyboardInterrupt:
        kept = "results are lost; with --checkpoint DIR the same command can resume"
        if checkpoint is not None:
            kept = f"the same command resumes from the checkpoint in {checkpoint}"
        if first:
            typer.echo(f"interrupted: {kept}", err=True)
        raise typer.Exit(130) from None
    except BadSetting as error:
        if first:
            raise
        raise typer.Exit(2) from error


def run(
    settings: "SimSettings", json: Path | None, plot: Path | None, ledger: Path | None, checkpoint: Path | None
) -> None:
    """Simulates with a progress bar, prints the results, and writes the requested files."""
    import torch
    from rich.console import Console

    from stormtorch.cli.terminal.screen import progress_bar
    from stormtorch.telemetry.progress import ignore_progress
    from stormtorch_lab.cli.plots.simulate import plot_simulation
    from stormtorch_lab.cli.policies import check_taken
    from stormtorch_lab.cli.tables.simulate import show_simulation
    from stormtorch_lab.simulation.processes import first, join, leave
    from stormtorch_lab.studies.on_workers import run_simulations

    check_taken(settings)
    join(torch.device(settings.device))
    total = settings.steps * len(settings.trainings)
    shown = (
        progress_bar(total, f"making {settings.workers} workers", unit="steps")
        if first()
        else contextlib.nullcontext(ignore_progress)
    )
    try:
        with shown as advance:
            report = run_simulations(settings, advance, checkpoint, ledger)
    finally:
        leave()
    if not first():
        return
    try:
        save(report.write, json)  # first, so that a later failure cannot lose the figures
    finally:
        show_simulation(report, Console())
    save(lambda path: plot_simulation(report, path), plot)

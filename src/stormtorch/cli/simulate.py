"""The command `stormtorch simulate`: it checks what was typed, shows progress and a table; others do the work."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stormtorch.cli.console import check_file, friendly_errors, save
from stormtorch.cli.options import check_outputs
from stormtorch.cli.simulate_options import (
    DEFAULT_POLICIES,
    MODELS,
    POLICIES,
    Device,
    How,
    Optimizer,
    Precision,
    Weights,
    Wire,
    spaced,
)

if TYPE_CHECKING:
    from stormtorch.studies.worker_settings import SimSettings

_NETWORK, _POLICY, _MODEL, _SPEED = "The network", "Policies", "The model", "How it is computed"


def simulate(
    workers: Annotated[int, typer.Option(help="Virtual workers, each with a replica of its own: 2 to 8,192.")] = 64,
    steps: Annotated[int, typer.Option(help="Of each training.")] = 200,
    seeds: Annotated[
        int, typer.Option(help="Trainings of each policy; each seed has weights, batches and loss of its own.")
    ] = 1,
    first_seed: Annotated[int, typer.Option(help="The first of them; the others follow.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Write settings and results to this file.", dir_okay=False)] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw the curves into this .png, .svg or .pdf; needs matplotlib.", dir_okay=False),
    ] = None,
    ledger: Annotated[
        Path | None, typer.Option(help="Write a line of JSON for every step to this file.", dir_okay=False)
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="Keep states and results in this folder: the same command again goes on where it stopped.",
            file_okay=False,
        ),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            help=f"Which to compare, separated by commas: {spaced(POLICIES)}. bounded-drift is lead, or plain with "
            "--lead off.",
            rich_help_panel=_POLICY,
        ),
    ] = DEFAULT_POLICIES,
    lead: Annotated[
        str,
        typer.Option(
            help="on, off, or a factor: how far ahead parameters are sent, in terms of the mean lag p/(1-p).",
            rich_help_panel=_POLICY,
        ),
    ] = "on",
    budget: Annotated[
        float,
        typer.Option(
            help="Fraction of each message that may be missing: 1 never sends anything again. Of parameters, "
            "and of models that are averaged.",
            rich_help_panel=_POLICY,
        ),
    ] = 1.0,
    gradient_budget: Annotated[
        float, typer.Option(help="The same of gradients, plain and lead.", rich_help_panel=_POLICY)
    ] = 1.0,
    weights: Annotated[
        Weights,
        typer.Option(
            help="plain and lead: the mean of the gradients that arrived, or each by the inverse of its chance to.",
            rich_help_panel=_POLICY,
        ),
    ] = Weights.mean,
    max_lag: Annotated[
        int | None,
        typer.Option(
            help="plain and lead: steps that a parameter may be out of date before it is fetched exactly.",
            rich_help_panel=_POLICY,
        ),
    ] = None,
    wire: Annotated[
        Wire, typer.Option(help="What lossless, plain and lead send.", rich_help_panel=_POLICY)
    ] = Wire.float32,
    every: Annotated[
        int, typer.Option(help="model-averaging: steps between two averagings.", rich_help_panel=_POLICY)
    ] = 1,
    loss: Annotated[
        float | None,
        typer.Option(
            help="Fraction of the chunks to lose on every link, 0 to 0.9; with --per-link, on those that it does not "
            "name.",
            show_default="0.1, or 0 with --per-link",
            rich_help_panel=_NETWORK,
        ),
    ] = None,
    burst: Annotated[float, typer.Option(help="Mean length of a run of losses.", rich_help_panel=_NETWORK)] = 1.0,
    per_link: Annotated[
        Path | None,
        typer.Option(
            help="A JSON file that says what single links lose: see docs/faults.md.",
            dir_okay=False,
            rich_help_panel=_NETWORK,
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines of recorded links: each link replays one that was drawn of those that lose 0.5 to 30 %.",
            dir_okay=False,
            rich_help_panel=_NETWORK,
        ),
    ] = None,
    shared: Annotated[
        float | None,
        typer.Option(
            help="How much of the loss is on a sender's way out, where all receivers lose the same chunk: 0 to 1.",
            rich_help_panel=_NETWORK,
        ),
    ] = None,
    stragglers: Annotated[
        float | None,
        typer.Option(
            help="Chance that a worker is late in an exchange, so that only a part of what it sends counts.",
            rich_help_panel=_NETWORK,
        ),
    ] = None,
    delivered: Annotated[
        float | None,
        typer.Option(help="That part.", show_default="drawn each time", rich_help_panel=_NETWORK),
    ] = None,
    model: Annotated[
        str, typer.Option(help=f"What is trained: one of {spaced(MODELS)}.", rich_help_panel=_MODEL)
    ] = "llama",
    data: Annotated[
        Path | None,
        typer.Option(
            help="What it learns from: a text or WikiText-2, CIFAR-10, ATIS; see docs/simulate.md.",
            show_default="llama: Python's standard library; resnet: scikit-learn's digits",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Examples of each worker in a step.", rich_help_panel=_MODEL)
    ] = None,
    lr: Annotated[float | None, typer.Option(help="The highest learning rate.", rich_help_panel=_MODEL)] = None,
    context: Annotated[
        int | None, typer.Option(help="Language models: tokens of an example.", rich_help_panel=_MODEL)
    ] = None,
    width: Annotated[
        int | None, typer.Option(help="llama: a multiple of 16; 64 makes 0.12 M parameters.", rich_help_panel=_MODEL)
    ] = None,
    layers: Annotated[int | None, typer.Option(help="llama: how many.", rich_help_panel=_MODEL)] = None,
    optimizer: Annotated[
        Optimizer,
        typer.Option(help="The model's own, or another; sgd has no momentum.", rich_help_panel=_MODEL),
    ] = Optimizer.task,
    device: Annotated[
        Device, typer.Option(help="auto takes a GPU if there is one.", rich_help_panel=_SPEED)
    ] = Device.auto,
    precision: Annotated[
        Precision, typer.Option(help="What matrices are multiplied in.", rich_help_panel=_SPEED)
    ] = Precision.float32,
    at_once: Annotated[
        int | None,
        typer.Option(
            help="Workers computed at a time.", show_default="as many as fit into memory", rich_help_panel=_SPEED
        ),
    ] = None,
    how: Annotated[
        How,
        typer.Option(
            help="All of those at once by torch.func.vmap, or one after the other; auto finds out.",
            rich_help_panel=_SPEED,
        ),
    ] = How.auto,
    fuse: Annotated[
        bool,
        typer.Option(
            "--fuse", help="Let torch.compile fuse kernels: slow at first, then faster.", rich_help_panel=_SPEED
        ),
    ] = False,
) -> None:
    """Train on many virtual workers in one process, over a network that loses: policies side by side.

    Every worker has a replica of its own and computes gradients on it; which chunks arrive is drawn for every link.
    Each policy begins with the same weights and sees the same batches, so differences come from the loss alone.
    The table tells perplexity or accuracy, how far replicas drifted apart and how old their copies are.
    Time is not simulated: nothing is late or congested unless you ask for it, and a step takes what it takes here.
    torchrun splits the workers over processes and GPUs.

    [bold]Examples[/bold]

      stormtorch simulate

      stormtorch simulate --loss 0.4 --policy lossless,plain,lead --seeds 3 --json out.json --plot out.png

      stormtorch simulate --loss 0.1 --burst 64 --lead off

      stormtorch simulate --workers 16 --policy lossless,model-averaging --model resnet20

      stormtorch simulate --per-link links.json --checkpoint run

      torchrun --nproc-per-node 2 -m stormtorch.cli simulate --workers 1024
    """
    with friendly_errors(), _one_voice(checkpoint):
        from stormtorch.cli.simulate_settings import Typed

        typed = Typed(
            policy=policy,
            lead=lead,
            loss=loss,
            burst=burst,
            per_link=per_link,
            trace=trace,
            shared=shared,
            stragglers=stragglers,
            delivered=delivered,
        )
        settings = typed.settings(
            workers=workers,
            steps=steps,
            seeds=seeds,
            first_seed=first_seed,
            budget=budget,
            gradient_budget=gradient_budget,
            weights=weights.value,
            max_lag=max_lag,
            wire=wire.value,
            every=every,
            model=model,
            data=data,
            batch=batch,
            lr=lr,
            context=context,
            width=width,
            layers=layers,
            optimizer=optimizer.value,
            device=device.value,
            precision=precision.value,
            at_once=at_once,
            how=how.value,
            fuse=fuse,
        )
        check_outputs(json, plot)
        check_file("ledger", ledger)
        run(settings, json, plot, ledger, checkpoint)


@contextlib.contextmanager
def _one_voice(checkpoint: Path | None) -> Iterator[None]:
    """Of all processes of torchrun, only the first tells what went wrong, and how to go on after Ctrl-C."""
    from stormtorch.checks import BadSetting

    first = os.environ.get("RANK", "0") == "0"
    try:
        yield
    except KeyboardInterrupt:
        kept = "nothing is kept; with --checkpoint DIR the same command would go on from here"
        if checkpoint is not None:
            kept = f"the same command goes on from here: what is done is in {checkpoint}"
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
    """Simulates with a progress bar, prints what came of it, and writes what was asked for."""
    import torch
    from rich.console import Console

    from stormtorch.cli.plots.simulate import plot_simulation
    from stormtorch.cli.screen import progress_bar
    from stormtorch.cli.tables.simulate import show_simulation
    from stormtorch.results.progress import ignore_progress
    from stormtorch.simulation.processes import first, join, leave
    from stormtorch.studies.on_workers import run_simulations

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
        save(report.write, json)  # first: whatever befalls the rest, the figures are kept
    finally:
        show_simulation(report, Console())
    save(lambda path: plot_simulation(report, path), plot)

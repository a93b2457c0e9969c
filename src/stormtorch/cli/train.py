"""The commands of `stormtorch train`: they check what was typed, show progress and a table; others do the work."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stormtorch.cli.console import friendly_errors, names, save
from stormtorch.cli.options import check_outputs, network_of

if TYPE_CHECKING:
    from stormtorch.lab.conditions import Conditions
    from stormtorch.studies.rank_settings import TrainSettings

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")

# Declared here, so that --help answers without importing torch; a test compares them with the real ones.
POLICIES = "lossless,plain,lead,model-averaging,gradient-averaging"
DEFAULT_POLICIES = "lossless,plain,lead"


class Wire(StrEnum):
    """What gradients and parameters can travel as."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    int8 = "int8"


_NETWORK, _LAB, _POLICY = "The network", "In a lab", "Policies"
Ranks = Annotated[int, typer.Option(help="Processes of this machine, each with a replica of the model: 2 to 64.")]
Steps = Annotated[int, typer.Option(help="Of each training.")]
Seeds = Annotated[
    int, typer.Option(help="Trainings of each policy; each seed has weights, batches and loss of its own.")
]
Batch = Annotated[int, typer.Option(help="Examples of each rank in a step.")]
Lr = Annotated[float, typer.Option(help="The highest learning rate; it rises first and falls as a cosine.")]
Policies = Annotated[
    str, typer.Option(help=f"Which to compare, separated by commas: {POLICIES}.", rich_help_panel=_POLICY)
]
WireOption = Annotated[
    Wire, typer.Option("--wire", help="What lossless, plain and lead send.", rich_help_panel=_POLICY)
]
Budget = Annotated[
    float,
    typer.Option(
        help="Fraction of each lossy message that may be missing: 1 never sends anything again.",
        rich_help_panel=_POLICY,
    ),
]
MaxLag = Annotated[
    int | None,
    typer.Option(
        help="plain and lead: steps that a parameter may be out of date before it is fetched exactly.",
        rich_help_panel=_POLICY,
    ),
]
Loss = Annotated[float, typer.Option(help="Fraction of the datagrams to lose: 0 to 0.9.", rich_help_panel=_NETWORK)]
Burst = Annotated[float, typer.Option(help="Mean length of a run of losses.", rich_help_panel=_NETWORK)]
InLab = Annotated[
    bool,
    typer.Option(
        "--lab", help="Lose real packets between virtual hosts; wants root or namespaces.", rich_help_panel=_LAB
    ),
]
Rate = Annotated[
    str | None, typer.Option(help="Of each host's line, such as 400mbit; makes a lab.", rich_help_panel=_LAB)
]
Delay = Annotated[
    str | None,
    typer.Option(
        help="From host to host, one way, such as 20ms: a round trip takes twice. Makes a lab.", rich_help_panel=_LAB
    ),
]
Json = Annotated[Path | None, typer.Option(help="Write settings and results to this file.", dir_okay=False)]
Plot = Annotated[
    Path | None, typer.Option(help="Draw the curves into this .png, .svg or .pdf; needs matplotlib.", dir_okay=False)
]
Timeout = Annotated[float, typer.Option(help="Give up after so many seconds in all.")]


@app.command()
def lm(
    ranks: Ranks = 4,
    steps: Steps = 200,
    seeds: Seeds = 1,
    batch: Batch = 32,
    lr: Lr = 1e-3,
    context: Annotated[int, typer.Option(help="Bytes of each example.")] = 64,
    layers: Annotated[int, typer.Option(help="Of the model.")] = 2,
    width: Annotated[int, typer.Option(help="Of the model, a multiple of 16: 64 makes 0.12 M parameters.")] = 64,
    text: Annotated[
        Path | None,
        typer.Option(help="Learn from this file.", show_default="the source of Python's standard library"),
    ] = None,
    json: Json = None,
    plot: Plot = None,
    timeout_s: Timeout = 3600.0,
    policies: Policies = DEFAULT_POLICIES,
    wire: WireOption = Wire.float32,
    budget: Budget = 1.0,
    max_lag: MaxLag = None,
    loss: Loss = 0.1,
    burst: Burst = 1.0,
    lab: InLab = False,
    rate: Rate = None,
    delay: Delay = None,
) -> None:
    """Train a small language model over a network that loses, policies side by side.

    A LLaMA of 0.12 million parameters that learns the next byte, with AdamW.
    Each policy begins with the same weights and sees the same batches, so differences come from the loss alone.
    Datagrams are lost on purpose where they arrive, which needs no root; or really, in a lab.
    The table tells the perplexity on files held out, the time of a step, and how far replicas drifted apart.

    [bold]Examples[/bold]

      stormtorch train lm

      stormtorch train lm --loss 0.3 --steps 100

      stormtorch train lm --policies lossless,plain,lead,model-averaging,gradient-averaging --seeds 3 --json lm.json

      stormtorch train lm --loss 0.1 --burst 8 --wire int8 --plot lm.png

      stormtorch train lm --rate 400mbit --delay 5ms --loss 0.1
    """
    with friendly_errors():
        from stormtorch.studies.rank_settings import LmSettings

        settings = LmSettings(
            ranks=ranks,
            steps=steps,
            seeds=seeds,
            batch=batch,
            lr=lr,
            context=context,
            layers=layers,
            width=width,
            text=text,
            policies=names(policies),
            wire=wire.value,
            budget=budget,
            max_lag=max_lag,
            loss=loss,
            burst=burst,
            network=_network(lab, loss, burst, rate, delay),
            timeout_s=timeout_s,
        )
        train(settings, json, plot)


@app.command()
def image(
    ranks: Ranks = 4,
    steps: Steps = 200,
    seeds: Seeds = 1,
    batch: Batch = 16,
    lr: Lr = 0.1,
    cifar10: Annotated[
        Path | None,
        typer.Option(
            help="Learn from CIFAR-10: a folder with data_batch_1 to 5 and test_batch, or one that holds "
            "cifar-10-batches-py.",
            show_default="scikit-learn's digits, 8 x 8",
        ),
    ] = None,
    json: Json = None,
    plot: Plot = None,
    timeout_s: Timeout = 3600.0,
    policies: Policies = DEFAULT_POLICIES,
    wire: WireOption = Wire.float32,
    budget: Budget = 1.0,
    max_lag: MaxLag = None,
    loss: Loss = 0.1,
    burst: Burst = 1.0,
    lab: InLab = False,
    rate: Rate = None,
    delay: Delay = None,
) -> None:
    """Train ResNet-20 over a network that loses, policies side by side.

    By SGD with momentum, on handwritten digits that come with scikit-learn, or on CIFAR-10 from a folder of yours.
    Each policy begins with the same weights and sees the same batches.
    The table tells loss and accuracy on pictures held out, the time of a step, and how far replicas drifted apart.

    [bold]Examples[/bold]

      stormtorch train image

      stormtorch train image --loss 0.3 --policies lossless,lead --seeds 3

      stormtorch train image --cifar10 ~/data/cifar-10-batches-py --batch 32 --steps 2000 --json image.json
    """
    with friendly_errors():
        from stormtorch.studies.rank_settings import ImageSettings

        settings = ImageSettings(
            ranks=ranks,
            steps=steps,
            seeds=seeds,
            batch=batch,
            lr=lr,
            cifar10=cifar10,
            policies=names(policies),
            wire=wire.value,
            budget=budget,
            max_lag=max_lag,
            loss=loss,
            burst=burst,
            network=_network(lab, loss, burst, rate, delay),
            timeout_s=timeout_s,
        )
        train(settings, json, plot)


def _network(lab: bool, loss: float, burst: float, rate: str | None, delay: str | None) -> "Conditions | None":
    """A lab's, where one was asked for or is needed."""
    if not lab and rate is None and delay is None:
        return None
    return network_of(0, rate=rate, delay=delay, loss=loss, burst=burst if burst != 1.0 else None)


def train(settings: "TrainSettings", json: Path | None = None, plot: Path | None = None) -> None:
    """Trains with a progress bar, prints what came of it, and writes what was asked for."""
    from rich.console import Console

    from stormtorch.cli.plots.train import plot_training
    from stormtorch.cli.screen import progress_bar
    from stormtorch.cli.tables.train import show_training
    from stormtorch.studies.on_ranks import run_training

    check_outputs(json, plot)
    total = settings.steps * len(settings.trainings)
    with progress_bar(total, f"starting {settings.ranks} processes", unit="steps") as advance:
        report = run_training(settings, advance)
    try:
        save(report.write, json)  # first: whatever befalls the rest, the figures are kept
    finally:
        show_training(report, Console())
    save(lambda path: plot_training(report, path), plot)

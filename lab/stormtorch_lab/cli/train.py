"""The command `stormtorch train`: options, progress and table."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from stormtorch.cli.console import check_outputs, friendly_errors, names, save
from stormtorch.cli.terminal.help_layout import App
from stormtorch.cli.terminal.options import Json, Plot
from stormtorch_lab.cli.networks import lab_network, typed_burst
from stormtorch_lab.cli.terminal.choices import TRAIN_POLICIES, ShardSizes, Weights, Wire
from stormtorch_lab.cli.terminal.options import (
    Batch,
    Budget,
    Burst,
    Context,
    Delay,
    Every,
    FirstSeed,
    GradientBudget,
    InLab,
    Layers,
    Lead,
    Loss,
    Lr,
    MaxLag,
    PictureData,
    PolicyNames,
    Ranks,
    Rate,
    RedundancyText,
    Seeds,
    Set,
    ShardsName,
    Steps,
    TextData,
    Timeout,
    WeightsName,
    Width,
    WireName,
)

if TYPE_CHECKING:
    from stormtorch_lab.netns.conditions import Conditions
    from stormtorch_lab.studies.settings import TrainSettings

app = App()


@app.command()
def lm(
    command: typer.Context,
    ranks: Ranks = 4,
    steps: Steps = 200,
    seeds: Seeds = 1,
    first_seed: FirstSeed = 0,
    json: Json = None,
    plot: Plot = None,
    timeout_s: Timeout = 3600.0,
    policy: PolicyNames = TRAIN_POLICIES,
    wire: WireName = Wire.float32,
    budget: Budget = 1.0,
    gradient_budget: GradientBudget = None,
    lead: Lead = 1.0,
    weights: WeightsName = Weights.mean,
    redundancy: RedundancyText = "0",
    max_lag: MaxLag = None,
    every: Every = 1,
    more: Set = None,
    shards: ShardsName = ShardSizes.equal,
    data: TextData = None,
    batch: Batch = 32,
    lr: Lr = 1e-3,
    context: Context = 64,
    layers: Layers = 2,
    width: Width = 64,
    loss: Loss = 0.1,
    burst: Burst = "1",
    lab: InLab = False,
    rate: Rate = None,
    delay: Delay = None,
) -> None:
    """Train a small language model over a lossy network, and compare policies.

    The model is a LLaMA of 0.12 million parameters that learns the next byte, with AdamW.
    Each policy begins with the same weights and sees the same batches, so differences come from the loss alone.
    Fault injection drops datagrams at the receivers, which needs no root; a lab drops real packets.
    The table shows the perplexity on held-out files, the time of a step, and how far replicas drifted apart.

    [bold]Examples[/bold]

      stormtorch train lm
      stormtorch train lm --loss 0.3 --steps 100
      stormtorch train lm --policy lossless,lead,model-averaging --seeds 3 --json lm.json
      stormtorch train lm --policy lossless,lead,my.py:MyPolicy
      stormtorch train lm --policy diloco,streaming-diloco --every 20 --set outer_lr=1 --set momentum=0.5
      stormtorch train lm --loss 0.1 --burst 8 --wire int8 --plot lm.png
      stormtorch train lm --loss 0.1 --burst 5ms
      stormtorch train lm --rate 400mbit --delay 5ms --loss 0.1
    """
    with friendly_errors():
        from stormtorch_lab.cli.policies import fields_of, given, redundancy_of
        from stormtorch_lab.studies.settings import LmSettings

        settings = LmSettings(
            ranks=ranks,
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
            shards=shards.value,
            given=given(command),
            data=data,
            batch=batch,
            lr=lr,
            context=context,
            layers=layers,
            width=width,
            loss=loss,
            burst=typed_burst(burst),
            network=_network(lab, loss, burst, rate, delay),
            timeout_s=timeout_s,
        )
        train(settings, json, plot)


@app.command()
def image(
    command: typer.Context,
    ranks: Ranks = 4,
    steps: Steps = 200,
    seeds: Seeds = 1,
    first_seed: FirstSeed = 0,
    json: Json = None,
    plot: Plot = None,
    timeout_s: Timeout = 3600.0,
    policy: PolicyNames = TRAIN_POLICIES,
    wire: WireName = Wire.float32,
    budget: Budget = 1.0,
    gradient_budget: GradientBudget = None,
    lead: Lead = 1.0,
    weights: WeightsName = Weights.mean,
    redundancy: RedundancyText = "0",
    max_lag: MaxLag = None,
    every: Every = 1,
    more: Set = None,
    shards: ShardsName = ShardSizes.equal,
    data: PictureData = None,
    batch: Batch = 16,
    lr: Lr = 0.1,
    loss: Loss = 0.1,
    burst: Burst = "1",
    lab: InLab = False,
    rate: Rate = None,
    delay: Delay = None,
) -> None:
    """Train ResNet-20 over a lossy network, and compare policies.

    It learns by SGD with momentum, from handwritten digits that come with scikit-learn, or from CIFAR-10 in a folder.
    Each policy begins with the same weights and sees the same batches.
    The table shows loss and accuracy on held-out images, the time of a step, and how far replicas drifted apart.

    [bold]Examples[/bold]

      stormtorch train image
      stormtorch train image --loss 0.3 --policy lossless,lead --seeds 3
      stormtorch train image --data ~/data/cifar-10-batches-py --batch 32 --steps 2000 --json image.json
    """
    with friendly_errors():
        from stormtorch_lab.cli.policies import fields_of, given, redundancy_of
        from stormtorch_lab.studies.settings import ImageSettings

        settings = ImageSettings(
            ranks=ranks,
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
            shards=shards.value,
            given=given(command),
            data=data,
            batch=batch,
            lr=lr,
            loss=loss,
            burst=typed_burst(burst),
            network=_network(lab, loss, burst, rate, delay),
            timeout_s=timeout_s,
        )
        train(settings, json, plot)


def _network(lab: bool, loss: float, burst: str, rate: str | None, delay: str | None) -> "Conditions | None":
    """Conditions of a lab, if one was requested or is needed."""
    if not lab and rate is None and delay is None:
        return None
    return lab_network(0, rate=rate, delay=delay, loss=loss, burst=burst if typed_burst(burst) != 1.0 else None)


def train(settings: "TrainSettings", json: Path | None = None, plot: Path | None = None) -> None:
    """Trains with a progress bar, prints the results, and writes the requested files."""
    from rich.console import Console

    from stormtorch.cli.terminal.screen import progress_bar
    from stormtorch_lab.cli.plots.train import plot_training
    from stormtorch_lab.cli.policies import check_taken
    from stormtorch_lab.cli.tables.train import show_training
    from stormtorch_lab.studies.on_ranks import run_training

    check_taken(settings)
    check_outputs(json, plot)
    total = settings.steps * len(settings.trainings)
    with progress_bar(total, f"starting {settings.ranks} processes", unit="steps") as advance:
        report = run_training(settings, advance)
    try:
        save(report.write, json)  # first, so that a later failure cannot lose the figures
    finally:
        show_training(report, Console())
    save(lambda path: plot_training(report, path), plot)

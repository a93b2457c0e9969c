"""`stormtorch theory`: what mathematics expects of a loss."""

import json as json_format
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stormtorch.cli.console import check_outputs, friendly_errors, save
from stormtorch.cli.terminal.options import Json, Plot
from stormtorch_lab.cli.terminal.options import Loss, MaxLag

if TYPE_CHECKING:
    from stormtorch.theory import Prediction


def theory(
    ranks: Annotated[int, typer.Option(help="Ranks that train together: 2 to 1,000,000.")] = 64,
    loss: Loss = 0.1,
    max_lag: MaxLag = None,
    steps: Annotated[int, typer.Option(help="Steps of a training without loss, to compare with.")] = 1000,
    chunks: Annotated[
        int, typer.Option(help="Datagrams that the model fills: 1 M parameters as float32 are 2,800.")
    ] = 10_000,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Tell what mathematics expects of a loss, before anything is trained.

    How old copies of parameters get, how far replicas drift apart, and what the lead does about it.
    How much noisier gradients become, how well averaged models mix, and how many more steps all that costs.
    Each number says whether it is exact, a bound, an approximation, or as a paper has it.
    Losses are taken for independent of each other. `stormtorch train` measures what really comes of them.

    [bold]Examples[/bold]

      stormtorch theory
      stormtorch theory --ranks 64 --loss 0.1 --max-lag 4
      stormtorch theory --ranks 16 --loss 0.3 --json theory.json --plot theory.png
    """
    with friendly_errors():
        from rich.console import Console

        from stormtorch.checks import check_between
        from stormtorch.theory import predict
        from stormtorch_lab.cli.tables.theory import show_prediction

        check_between("ranks", ranks, 2, 1_000_000)
        check_between("loss", loss, 0.0, 0.9)
        if max_lag is not None:
            check_between("max_lag", max_lag, 1, 1_000_000)
        check_between("steps", steps, 1, 1_000_000_000)
        check_between("chunks", chunks, 1, 1_000_000_000)
        check_outputs(json, plot)
        prediction = predict(ranks, loss, max_lag, steps=steps, chunks=chunks)
        save(lambda path: _write(prediction, path), json)
        if plot is not None:
            from stormtorch_lab.cli.plots.theory import plot_prediction

            save(lambda path: plot_prediction(prediction, path), plot)
        show_prediction(prediction, Console())  # last: a pager that is left early takes nothing else with it


def _write(prediction: "Prediction", path: Path) -> None:
    from stormtorch.theory import KINDS

    path.write_text(json_format.dumps({"prediction": asdict(prediction), "kinds": KINDS}, indent=2) + "\n")

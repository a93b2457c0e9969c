"""The command `stormtorch theory`: predicted effects of packet loss."""

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
    steps: Annotated[int, typer.Option(help="Steps of a training without loss, for comparison.")] = 1000,
    chunks: Annotated[int, typer.Option(help="Datagrams per model: 1 M parameters in float32 are 2,800.")] = 10_000,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Predict the effect of a loss rate from theory, without training.

    It predicts the age of copies of parameters, the drift of replicas, and the effect of the lead on both.
    It also predicts the noise of gradients, the mixing of averaged models, and the additional steps.
    Each number is marked as exact, a bound, an approximation, or published in a paper.
    Losses are assumed to be independent. `stormtorch train` measures their real effect.

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
        show_prediction(prediction, Console())  # last, so that quitting a pager early loses nothing


def _write(prediction: "Prediction", path: Path) -> None:
    from stormtorch.theory import KINDS

    path.write_text(json_format.dumps({"prediction": asdict(prediction), "kinds": KINDS}, indent=2) + "\n")

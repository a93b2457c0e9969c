"""The command `stormtorch theory`: what mathematics expects of a loss, as tables with a sentence for every number."""

import json as json_format
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stormtorch.cli.console import friendly_errors, save
from stormtorch.cli.options import check_outputs

if TYPE_CHECKING:
    from rich.console import Console

    from stormtorch.theory import Prediction


def theory(
    workers: Annotated[int, typer.Option(help="Ranks that train together: 2 to 1,000,000.")] = 64,
    loss: Annotated[float, typer.Option(help="Fraction of the datagrams that is lost: 0 to 0.9.")] = 0.1,
    max_lag: Annotated[
        int | None,
        typer.Option(help="Steps that a parameter may be out of date before it is fetched.", show_default="no bound"),
    ] = None,
    steps: Annotated[int, typer.Option(help="Of a training without loss, to compare with.")] = 1000,
    chunks: Annotated[
        int, typer.Option(help="Datagrams that the model fills: 1 M parameters as float32 are 2,800.")
    ] = (10_000),
    json: Annotated[Path | None, typer.Option(help="Write all numbers to this file.", dir_okay=False)] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw them into this .png, .svg or .pdf; needs matplotlib.", dir_okay=False),
    ] = None,
) -> None:
    """Tell what mathematics expects of a loss, before anything is trained.

    How old copies of parameters get, how far replicas drift apart, and what the lead does about it.
    How much noisier gradients become, how well averaged models mix, and how many more steps all that costs.
    Each number says whether it is exact, a bound, an approximation, or as a paper has it.
    Losses are taken for independent of each other. `stormtorch train` measures what really comes of them.

    [bold]Examples[/bold]

      stormtorch theory

      stormtorch theory --workers 64 --loss 0.1 --max-lag 4

      stormtorch theory --workers 16 --loss 0.3 --json theory.json --plot theory.png
    """
    with friendly_errors():
        from rich.console import Console

        from stormtorch.checks import check_between
        from stormtorch.theory import predict

        check_between("workers", workers, 2, 1_000_000)
        check_between("loss", loss, 0.0, 0.9)
        if max_lag is not None:
            check_between("max_lag", max_lag, 1, 1_000_000)
        check_between("steps", steps, 1, 1_000_000_000)
        check_between("chunks", chunks, 1, 1_000_000_000)
        check_outputs(json, plot)
        prediction = predict(workers, loss, max_lag, steps=steps, chunks=chunks)
        save(lambda path: _write(prediction, path), json)
        if plot is not None:
            from stormtorch.cli.plots.theory import plot_prediction

            save(lambda path: plot_prediction(prediction, path), plot)
        show_prediction(prediction, Console())  # last: a pager that is left early takes nothing else with it


def _write(prediction: "Prediction", path: Path) -> None:
    from stormtorch.theory import KINDS

    path.write_text(json_format.dumps({"prediction": asdict(prediction), "kinds": KINDS}, indent=2) + "\n")


def show_prediction(prediction: "Prediction", console: "Console") -> None:
    """A table for each part, a sentence for each number."""
    from stormtorch.cli.screen import new_table
    from stormtorch.theory import KINDS

    bound = "" if prediction.max_lag is None else f", no copy older than {prediction.max_lag} steps"
    console.print(f"{prediction.n} ranks, {100 * prediction.p:g} % loss{bound}", style="bold", highlight=False)
    for title, rows in table_rows(prediction).items():
        table = new_table(f"\n{title}")
        table.add_column("", no_wrap=True)
        table.add_column("", justify="right", no_wrap=True)
        table.add_column("", style="dim", no_wrap=True)
        table.add_column("")
        table.show_header = False
        for name, label, value, meaning in rows:
            table.add_row(label, value, KINDS[name].value, meaning)
        console.print(table, highlight=False)
    console.print(
        "exact: under its assumptions, as simulated; published: as Weintraub, Banner, Orda (2025) have it; bound: may "
        "be better; approximate: rests on a simplification. docs/theory.md has the formulas.",
        style="dim",
        highlight=False,
    )


def table_rows(found: "Prediction") -> dict[str, list[tuple[str, str, str, str]]]:
    """Rows by title: the field, its name for people, its value and what that means."""
    bounded = [
        ("fetched", "fetched exactly", _percent(found.fetched), "of the copies at each step: the price of the bound.")
    ]
    return {
        "How old a replica's copies are": [
            ("mean_lag", "mean lag", f"{_number(found.mean_lag)} steps", "Copies are behind by so much on average."),
            (
                "lag_deviation",
                "its deviation",
                f"{_number(found.lag_deviation)} steps",
                "How much copies differ in age.",
            ),
            ("up_to_date", "up to date", _percent(found.up_to_date), "of the copies are not old at all."),
            (
                "largest_lag",
                "largest lag",
                f"{found.largest_lag:.1f} steps",
                f"The oldest of all copies in {found.steps:,} steps, the model being {found.chunks:,} datagrams.",
            ),
            *(bounded if found.max_lag is not None else []),
            ("lead", "lead", f"{_number(found.lead)} updates", "Sent so far ahead, replicas are right on average."),
        ],
        "How far replicas drift, in variances of one update": [
            (
                "pair_drift",
                "two replicas",
                _number(found.pair_drift),
                "Mean squared difference of independent updates.",
            ),
            (
                "pair_drift_published",
                "as published",
                _number(found.pair_drift_published),
                "The same if every stale copy were one step old, and without a bound on the lag.",
            ),
            (
                "owner_drift",
                "owner, replica",
                _number(found.owner_drift),
                "The same between a copy and the true value.",
            ),
            (
                "pair_drift_by_mean",
                "two, by mean",
                _number(found.pair_drift_by_mean),
                "Added for updates with a mean, times its square over their variance.",
            ),
            (
                "owner_drift_by_mean",
                "owner, by mean",
                _number(found.owner_drift_by_mean),
                "The same between a copy and the true value.",
            ),
            (
                "pair_drift_lead",
                "two, lead",
                _number(found.pair_drift_lead),
                "With the lead, replicas differ more: it repeats the noise of the last update.",
            ),
            (
                "owner_drift_lead",
                "owner, lead",
                _number(found.owner_drift_lead),
                "The same between a copy and the true value.",
            ),
            (
                "owner_drift_by_mean_lead",
                "owner, by mean, lead",
                _number(found.owner_drift_by_mean_lead),
                "What the lead leaves of the mean's part; the bias is gone.",
            ),
            (
                "common_drift",
                "all together",
                _number(found.common_drift),
                "What a mean over many replicas is off by: no number of ranks averages it out.",
            ),
            (
                "common_drift_lead",
                "all together, lead",
                _number(found.common_drift_lead),
                "The lead takes it away: what replicas are off by is then each one's own.",
            ),
        ],
        "What averaged gradients suffer": [
            (
                "variance_inflation",
                "variance",
                f"{_number(found.variance_inflation)} x",
                "that of a mean over all ranks, as fewer gradients are averaged: like that of a batch of "
                f"{100 / found.variance_inflation:.0f} %.",
            ),
            (
                "owner_overweight",
                "owner's weight",
                f"+{_percent(found.owner_overweight)}",
                "An owner's own gradient counts too much: a bias if ranks see different data.",
            ),
            (
                "horvitz_thompson_inflation",
                "reweighted",
                f"{_number(found.horvitz_thompson_inflation)} x",
                "The variance if all ranks count alike (Horvitz-Thompson), of mean zero,",
            ),
            (
                "horvitz_thompson_by_mean",
                "  by mean",
                f"+{_number(found.horvitz_thompson_by_mean)} x",
                "and added to that, times the squared mean over the variance of a gradient.",
            ),
        ],
        "How models mix if they are averaged (RPS)": [
            ("a1", "a1", _number(found.a1), "What is left of differences after a round: 0 is perfect."),
            ("a2", "a2", _number(found.a2), "How much a round disturbs the mean over all ranks: 0 is perfect."),
            (
                "rate_factor",
                "rate",
                f"{_number(found.rate_factor)} x",
                "Loss makes the rate of convergence worse by that.",
            ),
            (
                "averaging_rate",
                "rate / sqrt(n T)",
                _number(found.averaging_rate),
                "The rate itself but for a constant of the problem: only ratios mean something.",
            ),
        ],
        f"How many steps come as far as {found.steps:,} without loss": [
            (
                "lead_steps",
                "with the lead",
                f"{found.lead_steps:,.1f}",
                "If noise limits the training, for the variance of gradients; otherwise fewer.",
            ),
            (
                "plain_steps",
                "without it",
                f"{found.plain_steps:,.1f}",
                "The mean lag more, at least: momentum and high learning rates suffer more.",
            ),
            (
                "averaging_steps",
                "model averaging",
                f"{found.averaging_steps:,.1f}",
                "By the ratio of bounds, which is pessimistic.",
            ),
        ],
    }


def _number(value: float) -> str:
    return f"{value:.3g}" if 0.0 < value < 0.1 else f"{value:.3f}" if value < 100.0 else f"{value:,.0f}"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2g} %" if 0.0 < fraction < 0.01 else f"{100 * fraction:.1f} %"

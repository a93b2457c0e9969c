"""Tables of the predictions of theory for a loss, with a sentence for every number."""

from rich.console import Console

from stormtorch.cli.terminal.screen import new_table
from stormtorch.theory import KINDS, Prediction


def answer(found: Prediction) -> str:
    """Summarises the cost of the loss in sentences, before the tables."""
    if found.p == 0.0:
        return "Without loss nothing is lost: every policy trains as it would on a perfect network."
    more = found.lead_steps / found.steps - 1
    return (
        f"With the lead, {found.lead_steps:,.0f} steps at {100 * found.p:g} % loss come as far as {found.steps:,} "
        f"without: at most {100 * more:.2g} % more, as averaged gradients are as noisy as those of a batch of "
        f"{100 / found.variance_inflation:.0f} %. Copies of parameters are {_number(found.mean_lag)} steps old on "
        "average, and the lead makes up for that."
    )


def show_prediction(prediction: Prediction, console: Console) -> None:
    """Prints the answer, then a table for each part of a prediction, with a sentence for each number."""
    console.print(answer(prediction), style="bold", highlight=False)
    console.print()
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


def table_rows(found: Prediction) -> dict[str, list[tuple[str, str, str, str]]]:
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

"""Tables of simulations: a row for each policy, and a summary in words."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from stormtorch.cli.terminal.screen import new_table
from stormtorch.network.loss import GilbertElliott, LossModel, PerLink, Shared, SlowBackward, Stragglers, Trace
from stormtorch.telemetry.statistics import mean, median
from stormtorch.telemetry.text import loss_text, share_text, size_text, time_text
from stormtorch_lab.cli.tables.train import (
    against_text,
    apart_text,
    budget_sentences,
    chance_sentences,
    drift_text,
    meaning_text,
    outcome_text,
    spread_text,
    success_text,
)
from stormtorch_lab.studies.results import SimReport, SimResult


def show_simulation(report: SimReport, console: Console) -> None:
    """Prints the table and the sentences."""
    console.print(policy_table(report))
    for sentence in sentences(report):
        console.print(f"- {sentence}", highlight=False)


def policy_table(report: SimReport) -> Table:
    """One row per policy."""
    settings = report.settings
    judged = "perplexity" if report.language else "points of accuracy"
    caption = f"against lossless: {judged}, of the same seed. step: median, on this machine. drift: mean squared "
    caption += (
        "difference per parameter between two replicas. lag: mean age of copies at the end, in steps. lead: in updates."
    )
    if settings.seeds > 1:
        caption += f" Means over {settings.seeds} seeds, ± their standard deviation."
    table = new_table(title_text(report), caption)
    table.add_column("policy", no_wrap=True)
    second = "per-\nplexity" if report.language else "accuracy"
    on_gpu = report.results[0].peak_bytes is not None
    for heading in (
        "val\nloss",
        second,
        "against\nlossless",
        "step",
        "drift",
        "lag",
        "lead",
        "arrived",
        *(("memory",) if on_gpu else ()),
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for policy in settings.labels:
        results = report.of(policy)
        against = report.against_lossless(policy)
        row = [
            policy,
            _two_lines(spread_text([result.val_loss for result in results], ".3f")),
            _two_lines(success_text(results)),
            "-" if against is None or policy == "lossless" else _two_lines(against_text(report, against)),
            time_text(median([result.step_s for result in results])),
            drift_text(mean([result.drift for result in results])),
            _number_text(_lag(results)),
            _number_text(mean([result.lead for result in results])) if _lag(results) is not None else "-",
            share_text(mean([result.arrived for result in results])),
        ]
        table.add_row(*row, *([size_text(max(result.peak_bytes or 0 for result in results))] if on_gpu else []))
    return table


def title_text(report: SimReport) -> str:
    """Describes what was simulated."""
    settings = report.settings
    name = report.requested["data"]["data"]["name"]
    return (
        f"{report.requested['params'] / 1e6:.2g} M parameters, {name}, {settings.steps} steps on {settings.workers} "
        f"virtual workers, {network_text(settings.loss_model())}"
    )


def network_text(network: LossModel) -> str:
    """Describes a loss model in words: "10 % loss in bursts of 64"."""
    if isinstance(network, Stragglers):
        late = f"{100 * network.chance:g} % of the workers late in each exchange"
        return f"{network_text(network.network)}, {late}"
    if isinstance(network, SlowBackward):
        return f"{network_text(network.network)}, backwards that take time"
    if isinstance(network, PerLink):
        if not network.links:
            return network_text(network.default)
        models = list(network.links.values())
        if all(isinstance(model, Trace) for model in models):
            return f"links that replay {len(set(models))} recorded ones"
        own = "1 link with its own loss" if len(models) == 1 else f"{len(models)} links with their own loss"
        return f"{own}, {network_text(network.default)} on the others"
    if isinstance(network, Trace):
        return f"a recorded link that loses {100 * sum(network.bits) / len(network.bits):.1f} %"
    bursts = "" if not isinstance(network, GilbertElliott | Shared) or network.burst == 1.0 else network.burst
    text = f"{100 * network.p:g} % loss" + (f" in bursts of {bursts:g}" if bursts else "")
    return f"{text}, {100 * network.share:g} % of it shared by all receivers" if isinstance(network, Shared) else text


def sentences(report: SimReport) -> list[str]:
    """Summarises the results in sentences; every number is from this run."""
    settings, found = report.settings, []
    if settings.labels != ("lossless",):
        found.append(
            f"{loss_text(report.measured['loss'])} of the chunks did not arrive; every policy began with the same "
            "weights and saw the same batches."
        )
    found += budget_sentences(settings)
    found += [_sentence(report, policy) for policy in settings.labels]
    found.append("Only loss is simulated, not time: step is the time that this machine takes to compute all workers.")
    return found + chance_sentences(settings.labels, settings.seeds)


def _sentence(report: SimReport, policy: str) -> str:
    results = report.of(policy)
    text = f"{policy} {meaning_text(report.settings, policy)}. {outcome_text(report, policy)}."
    text += f" Its replicas {apart_text(results)}"
    lag, lead = _lag(results), mean([result.lead for result in results])
    if policy == "lossless" or lag is None:
        return f"{text}."
    text += f"; their copies were {_number_text(lag)} steps old on average"
    text += f", and parameters were sent {_number_text(lead)} updates ahead" if lead else ""
    fetched = sum(result.fetched for result in results)
    text += f"; {fetched} chunks were fetched exactly, as they would have become too old." if fetched else "."
    guarded = sum(result.guarded for result in results)
    if guarded:
        steps = report.settings.steps * len(results)
        text += (
            f" Its guard repaired the broadcast in {guarded} of {steps} steps, as a worker had missed too much of it."
        )
    return text


def _lag(results: Sequence[SimResult]) -> float | None:
    known = [result.mean_lag for result in results if result.mean_lag is not None]
    return mean(known) if known else None


def _two_lines(text: str) -> str:
    return text.replace(" ± ", "\n± ")


def _number_text(value: float | None) -> str:
    return "-" if value is None else "0" if value == 0.0 else f"{value:.2g}"

"""Tables of trainings: a row for each policy, and a summary in words."""

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from stormtorch.cli.terminal.screen import new_table
from stormtorch.telemetry.statistics import mean, median, spread
from stormtorch.telemetry.text import loss_text, network_text, oversubscription_text, ratio_text, share_text, time_text
from stormtorch_lab.studies.results import StudyReport, TrainReport, TrainResult
from stormtorch_lab.studies.settings import StudySettings

MEANINGS = {
    "lossless": "retransmits every lost chunk, and learns the same as on a network without loss",
    "plain": "takes loss as it comes: a gradient is the mean of the contributions received, and a parameter whose "
    "update is lost stays as it was until the next one",
    "lead": "is plain with one correction: parameters are sent extrapolated by as much as replicas lag behind on "
    "average",
    "model-averaging": "has every rank train a model of its own and averages what arrives of the models after "
    "each step",
    "gradient-averaging": "has every rank apply the gradients that reached it: nothing brings replicas together again",
}
"""Meanings of the presets, each as the end of a sentence that begins with its name."""


def meaning_text(settings: StudySettings, policy: str) -> str:
    """Says what a policy does, or which file it comes from, as the end of a sentence that begins with its label."""
    if policy in MEANINGS:
        return MEANINGS[policy]
    file = settings.typed(policy).rpartition(":")[0]
    return f"comes from {file}" if file else f"is stormtorch.{type(settings.policy_of(policy)).__name__}"


def show_training(report: TrainReport, console: Console) -> None:
    """Prints the table and the sentences."""
    console.print(policy_table(report))
    for sentence in sentences(report):
        console.print(f"- {sentence}", highlight=False)


def policy_table(report: TrainReport) -> Table:
    """One row per policy."""
    settings = report.settings
    judged = "perplexity" if report.language else "points of accuracy"
    title = (
        f"{report.requested['params'] / 1e6:.2g} M parameters, {report.requested['data']['name']}, "
        f"{settings.steps} steps on {settings.ranks} ranks, {where_text(report)}"
    )
    caption = f"against lossless: {judged}, of the same seed. step: median, by the slowest rank. drift: mean squared "
    caption += "difference per parameter between two replicas."
    if settings.seeds > 1:
        caption += f" Means over {settings.seeds} seeds, ± their standard deviation."
    if settings.network is None:
        caption += oversubscription_text(settings.ranks, report.conditions["machine"]["cores_usable"])
    if drops := report.measured["kernel_drops"]:
        caption += f" The kernel dropped {drops} datagrams because socket buffers were full."
    table = new_table(title, caption)
    table.add_column("policy", no_wrap=True)
    second = "per-\nplexity" if report.language else "accuracy"
    for heading in ("val\nloss", second, "against\nlossless"):
        table.add_column(heading, justify="right")  # with ± they may need two lines
    for heading in ("step", "drift", "arrived"):
        table.add_column(heading, justify="right", no_wrap=True)
    for policy in settings.labels:
        results = report.of(policy)
        against = report.against_lossless(policy)
        table.add_row(
            policy,
            spread_text([result.val_loss for result in results], ".3f"),
            success_text(results),
            "-" if against is None or policy == "lossless" else against_text(report, against),
            time_text(median([result.step_s for result in results])),
            drift_text(mean([result.drift for result in results])),
            share_text(mean([result.arrived for result in results])),
        )
    return table


def sentences(report: TrainReport) -> list[str]:
    """Summarises the results in sentences; every number is from this run."""
    settings = report.settings
    found = [
        f"{loss_text(report.measured['loss'])} of the datagrams were lost, {loss_text(settings.loss)} requested; "
        "every policy began with the same weights and saw the same batches."
    ]
    found += budget_sentences(settings)
    found += [_sentence(report, policy) for policy in settings.labels]
    return found + chance_sentences(settings.labels, settings.seeds)


def budget_sentences(settings: StudySettings) -> list[str]:
    """Describes the budget of lossy messages, if they were repaired."""
    gradients = settings.gradient_budget
    if gradients is not None and gradients != settings.budget:
        return [
            f"Lossy messages were repaired until at most {loss_text(settings.budget)} of each was missing; of "
            f"gradients, at most {loss_text(gradients)}."
        ]
    if settings.budget < 1.0:
        return [f"Lossy messages were repaired until at most {loss_text(settings.budget)} of each was missing."]
    return []


def _sentence(report: TrainReport, policy: str) -> str:
    results = report.of(policy)
    text = f"{policy} {meaning_text(report.settings, policy)}. {outcome_text(report, policy)}"
    if policy != "lossless" and report.of("lossless") and not diverged(results):
        lossless_s = median([result.step_s for result in report.of("lossless")])
        ratio = median([result.step_s for result in results]) / lossless_s
        text += f"; a step took {ratio_text(ratio)} times as long as lossless's"
    arrived = mean([result.arrived for result in results])
    return f"{text}. {share_text(arrived)} of its chunks arrived, and its replicas {apart_text(results)}."


def outcome_text(report: StudyReport[Any, Any], policy: str) -> str:
    """Describes the result of a policy, as the beginning of a sentence."""
    results = report.of(policy)
    if diverged(results):
        return "It diverged"
    text = f"It reached {'a perplexity' if report.language else 'an accuracy'} of {success_text(results)}"
    against = None if policy == "lossless" else report.against_lossless(policy)
    return text if against is None else f"{text}, {against_text(report, against)} against lossless"


def diverged(results: Sequence[TrainResult]) -> bool:
    """Whether any of these trainings diverged."""
    return not math.isfinite(mean([result.val_loss for result in results]))


def apart_text(results: Sequence[TrainResult]) -> str:
    """Describes the final drift of the replicas."""
    drift = mean([result.drift for result in results])
    return "ended the same" if drift == 0.0 else f"ended {math.sqrt(drift):.2g} apart (root mean square)"


def chance_sentences(policies: Sequence[str], seeds: int) -> list[str]:
    """Describes the significance of differences between policies."""
    if len(policies) == 1:
        return []
    if seeds == 1:
        return ["This is one seed: small differences may be chance; --seeds 3 estimates how much."]
    if "lossless" in policies:
        return ["A difference to lossless that is no larger than its ± may be chance; more seeds or steps decide."]
    return []


def success_text(results: Sequence[TrainResult]) -> str:
    """Perplexity or accuracy."""
    if results[0].perplexity is not None:
        return spread_text([result.perplexity or math.nan for result in results], ".2f")
    return spread_text([100 * (result.accuracy or 0.0) for result in results], ".1f", " %")


def against_text(report: StudyReport[Any, Any], against: Sequence[float]) -> str:
    """Perplexity in percent, or points of accuracy."""
    return spread_text([100 * each for each in against], "+.2f", " %" if report.language else " points")


def where_text(report: TrainReport) -> str:
    """Describes the network: "10 % loss injected on loopback", "400 Mbit/s, 10 % loss"."""
    settings = report.settings
    bursts = "" if settings.burst == 1.0 else f" in bursts of {_burst_text(settings.burst)}"
    loss = f"{100 * settings.loss:g} % loss{bursts}"
    if settings.network is None:
        return f"{loss} injected on loopback"
    return f"{network_text(report.measured['requested'])}, {loss}"


def _burst_text(burst: float | str) -> str:
    return burst if isinstance(burst, str) else f"{burst:g}"


def spread_text(values: Sequence[float], form: str, unit: str = "") -> str:
    """Mean, and of several values their standard deviation: "10.31 ± 0.07"."""
    centre = mean(values)
    text = format(centre, form) if math.isfinite(centre) else "-"
    if len(values) > 1 and math.isfinite(centre):
        text += f" ± {format(spread(values), form.lstrip('+'))}"
    return text + unit if math.isfinite(centre) else text


def drift_text(drift: float) -> str:
    """Drift with two digits; "0" only where there is none."""
    return "0" if drift == 0.0 else f"{drift:.1e}"

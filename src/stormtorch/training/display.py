"""How trainings look in a terminal: a table of the policies, and what it means in words."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from stormtorch.bench.display import crowding_text, loss_text, new_table, ratio_text, share_text, time_text
from stormtorch.bench.samples import median
from stormtorch.bench.tables import network_text
from stormtorch.training.results import TrainReport, TrainResult

MEANINGS = {
    "lossless": "repairs whatever is lost, so that its replicas are those of an undisturbed network, bit for bit",
    "plain": "repairs nothing: a gradient is the mean of what arrived, and a parameter whose update is lost stays as "
    "it was until the next one",
    "lead": "is plain with one correction: parameters are sent a little ahead of themselves, by as much as replicas "
    "are behind on average",
    "model-averaging": "has every rank train a model of its own and averages what arrives of the models after "
    "each step",
    "gradient-averaging": "has every rank apply the gradients that reached it: nothing brings replicas together again",
}
"""What the policies do, each after its name."""


def show_training(report: TrainReport, console: Console) -> None:
    """The table and the sentences."""
    console.print(policy_table(report))
    for sentence in sentences(report):
        console.print(f"- {sentence}", highlight=False)


def policy_table(report: TrainReport) -> Table:
    """One row per policy."""
    settings, judged = report.settings, "perplexity" if report.language else "validation loss"
    title = (
        f"{report.asked['params'] / 1e6:.2g} M parameters, {report.asked['data']['name']}, {settings.steps} steps on "
        f"{settings.ranks} ranks, {where_text(report)}"
    )
    caption = f"against lossless: {judged}, of the same seed. step: median, by the slowest rank. drift: mean squared "
    caption += "difference per parameter between two replicas."
    if settings.seeds > 1:
        caption += f" Means over {settings.seeds} seeds, ± their standard deviation."
    if settings.network is None:
        caption += crowding_text(settings.ranks, report.conditions["machine"]["cores_usable"])
    if drops := report.measured["kernel_drops"]:
        caption += f" The kernel dropped {drops} datagrams for want of buffer."
    table = new_table(title, caption)
    table.add_column("policy", no_wrap=True)
    second = "per-\nplexity" if report.language else "accuracy"
    for heading in ("validation\nloss", second, "against\nlossless", "step", "drift", "arrived"):
        table.add_column(heading, justify="right", no_wrap=True)
    for policy in settings.policies:
        results = report.of(policy)
        against = report.against_lossless(policy)
        table.add_row(
            policy,
            _spread_text(results, lambda result: result.val_loss, "{:.3f}"),
            _spread_text(results, lambda result: result.perplexity or math.nan, "{:.2f}")
            if report.language
            else _spread_text(results, lambda result: 100 * (result.accuracy or 0.0), "{:.1f} %"),
            "-" if against is None or policy == "lossless" else difference_text(_mean(against)),
            time_text(median([result.step_s for result in results])),
            drift_text(_mean([result.drift for result in results])),
            share_text(_mean([result.arrived for result in results])),
        )
    return table


def sentences(report: TrainReport) -> list[str]:
    """What was seen, in words; every number is of this run."""
    settings = report.settings
    found = [
        f"{loss_text(report.measured['loss'])} of the datagrams were lost, {loss_text(settings.loss)} had been asked "
        "for; every policy began with the same weights and saw the same batches."
    ]
    found += [_sentence(report, policy) for policy in settings.policies]
    if len(settings.policies) == 1:
        return found
    if settings.seeds == 1:
        found.append("This is one seed: small differences may be chance, and --seeds 3 shows how much of them is.")
    elif lossless := report.of("lossless"):
        judged = [result.judged for result in lossless]
        found.append(
            f"From seed to seed, lossless itself differs by {loss_text((max(judged) - min(judged)) / _mean(judged))}."
        )
    return found


def _sentence(report: TrainReport, policy: str) -> str:
    results = report.of(policy)
    judged, name = _mean([result.judged for result in results]), "perplexity" if report.language else "validation loss"
    text = f"{policy} {MEANINGS[policy]}. It came to a {name} of {judged:.3g}"
    if not math.isfinite(judged):
        text = f"{policy} {MEANINGS[policy]}. It diverged: no {name} can be told"
    against = report.against_lossless(policy)
    if against is not None and policy != "lossless":
        lossless_s = median([result.step_s for result in report.of("lossless")])
        ratio = median([result.step_s for result in results]) / lossless_s
        if math.isfinite(_mean(against)):
            text += f", {difference_text(_mean(against))} against lossless"
        text += f"; a step took {ratio_text(ratio)} times as long as lossless's"
    arrived = _mean([result.arrived for result in results])
    drift = _mean([result.drift for result in results])
    text += f". {share_text(arrived)} of its chunks arrived, and its replicas "
    return text + ("ended the same." if drift == 0.0 else f"ended {math.sqrt(drift):.2g} apart (root mean square).")


def where_text(report: TrainReport) -> str:
    """Which network it was: "10 % loss injected on loopback", "400 Mbit/s, 10 % loss"."""
    settings = report.settings
    bursts = f" in bursts of {settings.burst:g}" if settings.burst > 1 else ""
    loss = f"{100 * settings.loss:g} % loss{bursts}"
    if settings.network is None:
        return f"{loss} injected on loopback"
    return f"{network_text(report.measured['requested'])}, {loss}"


def difference_text(fraction: float) -> str:
    """Percent with a sign: "+0.41 %"."""
    return f"{100 * fraction:+.2f} %" if math.isfinite(fraction) else "-"


def drift_text(drift: float) -> str:
    """Two digits; nothing but nothing is 0."""
    return "0" if drift == 0.0 else f"{drift:.1e}"


def _spread_text(results: Sequence[TrainResult], value: Callable[[TrainResult], float], form: str) -> str:
    values = [value(result) for result in results]
    mean = _mean(values)
    if len(values) == 1 or not math.isfinite(mean):
        return form.format(mean)
    spread = math.sqrt(sum((each - mean) ** 2 for each in values) / (len(values) - 1))
    return f"{form.format(mean)} ± {spread:.2g}"


def _mean(values: Sequence[Any]) -> float:
    return float(sum(values) / len(values))

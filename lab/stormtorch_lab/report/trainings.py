"""Page of trainings under loss: `stormtorch train` and `stormtorch simulate`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stormtorch.telemetry.statistics import mean, spread
from stormtorch_lab.report.parts import (
    Bar,
    BarChart,
    Fact,
    LineChart,
    Mark,
    Page,
    PageElement,
    Section,
    Series,
    Table,
    colours_of,
)
from stormtorch_lab.report.text import listed, machine_rows, percent


@dataclass(frozen=True)
class TrainingRuns:
    """All seeds of one policy."""

    name: str
    policy: str
    runs: list[dict[str, Any]]

    @property
    def ended(self) -> list[dict[str, Any]]:
        """Runs that did not diverge."""
        return [run for run in self.runs if run.get("val_loss") is not None]

    @property
    def language(self) -> bool:
        """Whether the model is a language model."""
        return self.runs[0].get("accuracy") is None

    def scores(self) -> list[float]:
        """Perplexity or accuracy of each seed."""
        key = "perplexity" if self.language else "accuracy"
        return [float(run[key]) for run in self.ended if run.get(key) is not None]

    def against(self, other: "TrainingRuns") -> list[float]:
        """How much worse each seed is than the same seed of another: relative perplexity, or accuracy lost."""
        found = []
        key = "perplexity" if self.language else "accuracy"
        base = {run["seed"]: run.get(key) for run in other.ended}
        for run in self.ended:
            before, own = base.get(run["seed"]), run.get(key)
            if before and own is not None:
                found.append(own / before - 1 if self.language else before - own)
        return found


def trainings_of(files: Sequence[tuple[str, dict[str, Any]]]) -> list[TrainingRuns]:
    """Groups results by policy, and by file if there are several."""
    found: list[TrainingRuns] = []
    for name, data in files:
        policies = list(dict.fromkeys(str(result["policy"]) for result in data["results"]))
        for policy in policies:
            runs = [result for result in data["results"] if result["policy"] == policy]
            found.append(TrainingRuns(policy if len(files) == 1 else f"{policy} ({name})", policy, runs))
    return found


def cost_sentence(trainings: Sequence[TrainingRuns], lost: float, steps: int) -> tuple[str, str]:
    """Returns the verdict, the cost of packet loss, and a tone."""
    base = next((each for each in trainings if each.policy == "lossless"), None)
    others = [each for each in trainings if each is not base and each.scores()]
    what = "perplexity" if trainings[0].language else "accuracy"
    if base is None or not others or not base.scores():
        return f"{len(trainings)} trainings of {steps} steps at {percent(lost)} loss; none of them lossless.", "plain"
    words = []
    for each in others:
        costs = each.against(base)
        if not costs:
            continue
        error = f" ± {100 * spread(costs) / len(costs) ** 0.5:.1f}" if len(costs) > 1 else ""
        unit = "%" if each.language else "points"
        words.append(f"{each.name} {100 * mean(costs) * (1 if each.language else -1):+.1f}{error} {unit}")
    seeds = len(base.runs)
    sure = f"{seeds} seeds" if seeds > 1 else "one seed, so a percent or two is chance"
    text = (
        f"At {percent(lost)} loss, {steps} steps change {what} against the lossless run by: {listed(words)} ({sure})."
    )
    lead = next((each for each in others if each.policy == "lead"), None)
    best = min(mean(each.against(base)) for each in ([lead] if lead else others))
    return text, "good" if best < 0.03 else "warn"


def training_page(files: Sequence[tuple[str, dict[str, Any]]]) -> Page:
    """Makes the page of one study, or of several side by side."""
    trainings = trainings_of(files)
    data = files[0][1]
    settings, measured = data["settings"], data.get("measured", {})
    lost = float(measured.get("loss") or settings.get("loss") or 0.0)
    steps = int(settings["steps"])
    who = f"{settings['ranks']} ranks" if "ranks" in settings else f"{settings['workers']} virtual workers"
    verdict, tone = cost_sentence(trainings, lost, steps)
    name = (settings.get("data") or {}).get("name", "")
    return Page(
        title="Cost of packet loss" if len(files) == 1 else "Cost of packet loss, compared",
        subtitle=f"{settings.get('params', 0) / 1e6:.2g} M parameters learn {name} on {who}, {percent(lost)} loss",
        verdict=verdict,
        tone=tone,
        facts=_facts(trainings, lost),
        sections=training_sections(trainings),
        conditions=[
            ("network", str(measured.get("network", "simulated"))),
            ("loss measured", percent(lost)),
            ("steps", str(steps)),
            ("learning rate", str(settings.get("lr"))),
            *machine_rows(data.get("conditions", {})),
        ],
    )


def training_sections(trainings: Sequence[TrainingRuns]) -> list[Section]:
    """Curves as bands over seeds, differences from lossless, and a table."""
    colours = colours_of([each.name if each.name != each.policy else each.policy for each in trainings])
    parts: list[PageElement] = []
    base = next((each for each in trainings if each.policy == "lossless"), None)
    bars = []
    for each in trainings:
        costs = each.against(base) if base else []
        if costs and each is not base:
            cost = 100 * mean(costs)
            unit = "%" if each.language else "points"
            dots = [100 * cost for cost in costs] if len(costs) > 1 else []
            bars.append(
                Bar(name=each.name, value=cost, text=f"{cost:+.1f} {unit}", colour=colours[each.name], dots=dots)
            )
    if bars:
        label = "perplexity above lossless, %" if trainings[0].language else "accuracy below lossless, points"
        parts.append(
            BarChart(
                title="Cost against the lossless run of the same seed",
                label=label,
                bars=bars,
                note="Zero is no cost; dots are seeds.",
            )
        )
    if base is not None and bars:
        series = [_above(each, base, colours[each.name]) for each in trainings if each is not base and each.ended]
        parts.append(
            LineChart(
                title="Validation loss above the lossless run of the same seed",
                x_label="steps",
                y_label="nats above lossless",
                series=[each for each in series if each is not None],
                marks=[Mark(y=0.0, text="lossless")],
                note="The differences of the curves below, which overlap. Bands show the range over the seeds.",
            )
        )
    parts.append(
        LineChart(
            title="Validation loss against steps",
            x_label="steps",
            y_label="validation loss",
            series=[_band(each, colours[each.name], 0) for each in trainings if each.ended],
            note="Bands show the range from the best to the worst seed.",
        )
    )
    drifts = [each for each in trainings if each.runs[0].get("drift_curve")]
    if drifts:
        parts.append(_drift_chart(drifts, colours))
    rows = [
        (
            each.name,
            f"{mean(each.scores()):.4g}" if each.scores() else "diverged",
            f"{mean([run['val_loss'] for run in each.ended]):.4f}" if each.ended else "",
            percent(mean([float(run["arrived"]) for run in each.runs])),
            f"{mean([float(run['drift'] or 0.0) for run in each.runs]):.3g}",
            f"{1000 * mean([float(run['step_s']) for run in each.runs]):.0f} ms",
            len(each.runs),
        )
        for each in trainings
    ]
    score = "perplexity" if trainings[0].language else "accuracy"
    table = Table(
        title="All policies",
        headings=("", score, "validation loss", "chunks arrived", "drift", "a step", "seeds"),
        rows=[*rows],
    )
    return [Section(heading="Cost of packet loss", parts=[*parts, table])]


def _facts(trainings: Sequence[TrainingRuns], lost: float) -> list[Fact]:
    base = next((each for each in trainings if each.policy == "lossless"), None)
    colours = colours_of([each.name for each in trainings])
    facts = []
    for each in trainings:
        costs = each.against(base) if base and each is not base else []
        if costs and each.language:
            text = f"perplexity, {each.name} against lossless"
            facts.append(Fact(figure=f"{100 * mean(costs):+.1f} %", text=text, colour=colours[each.name]))
    return [*facts[:4], Fact(figure=percent(lost), text="of the chunks or datagrams lost, measured")]


def _band(training: TrainingRuns, colour: str, first: int) -> Series:
    curves = [run["val_curve"] for run in training.ended]
    length = min(len(curve) for curve in curves)
    columns = [[float(curve[index][2]) for curve in curves] for index in range(first, length)]
    return Series(
        name=training.name,
        colour=colour,
        x=[float(curves[0][index][0]) for index in range(first, length)],
        y=[mean(column) for column in columns],
        low=[min(column) for column in columns] if len(curves) > 1 else None,
        high=[max(column) for column in columns] if len(curves) > 1 else None,
        dashed=training.policy == "lossless",
    )


def _above(training: TrainingRuns, base: TrainingRuns, colour: str) -> Series | None:
    """Differences from lossless, seed by seed, which the steep curves themselves do not show."""
    before = {run["seed"]: {row[0]: float(row[2]) for row in run["val_curve"]} for run in base.ended}
    runs = [run for run in training.ended if run["seed"] in before]
    if not runs:
        return None
    steps = [row[0] for row in runs[0]["val_curve"]]
    steps = [step for step in steps if all(step in before[run["seed"]] for run in runs)]
    found = [{row[0]: float(row[2]) - before[run["seed"]].get(row[0], 0.0) for row in run["val_curve"]} for run in runs]
    columns = [[each[step] for each in found if step in each] for step in steps]
    several = len(runs) > 1
    return Series(
        name=training.name,
        colour=colour,
        x=[float(step) for step in steps],
        y=[mean(column) for column in columns],
        low=[min(column) for column in columns] if several else None,
        high=[max(column) for column in columns] if several else None,
    )


def _drift_chart(trainings: Sequence[TrainingRuns], colours: dict[str, str]) -> LineChart:
    series = []
    for each in trainings:
        curve = [(float(row[0]), row[1]) for row in each.runs[0]["drift_curve"] if row[1]]
        if curve:
            x, y = [step for step, _ in curve], [float(value) for _, value in curve]
            series.append(Series(name=each.name, colour=colours[each.name], x=x, y=[*y]))
    return LineChart(
        title="Drift of two replicas",
        x_label="steps",
        y_label="mean squared difference",
        series=series,
        y_log=True,
        note="First seed of each policy.",
    )

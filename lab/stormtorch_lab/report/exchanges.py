"""Pages of benchmarks that time exchanges and steps: `bench allreduce`, `latency`, `ddp` and `sweep`."""

from collections.abc import Sequence
from typing import Any

from stormtorch.telemetry.text import network_text, size_text, time_text
from stormtorch_lab.report.parts import (
    Bar,
    BarChart,
    Fact,
    Grid,
    LineChart,
    Mark,
    Page,
    Section,
    Series,
    Table,
    colours_of,
)
from stormtorch_lab.report.text import machine_rows, percent, ranks_of, requested_loss_text, times, where_text


def allreduce_page(files: Sequence[tuple[str, dict[str, Any]]]) -> Page:
    """Makes the page of `bench allreduce`, one chart per file and size."""
    parts, rows = [], []
    for name, data in files:
        ahead = f"{name}: " if len(files) > 1 else ""
        for mb in dict.fromkeys(result["mb"] for result in data["results"]):
            results = [result for result in data["results"] if result["mb"] == mb]
            parts.append(_bars(f"{ahead}all-reduce of {mb:g} MB", "median time, s", results, _ideal(results)))
            rows += [(f"{ahead}{result['backend']}", f"{mb:g} MB", *_cells(result)) for result in results]
    conditions = files[0][1]["conditions"]
    results = files[0][1]["results"]
    verdict, tone = _beside(results[: len(conditions["backends"])], f"{results[0]['mb']:g} MB are summed", conditions)
    table = Table(
        title="All results",
        headings=("", "size", "median", "99th percentile", "worst", "arrived", "rounds"),
        rows=[*rows],
    )
    return Page(
        title="All-reduce against gloo",
        subtitle=_where(conditions),
        verdict=verdict,
        tone=tone,
        facts=_facts(results[: len(conditions["backends"])], conditions),
        sections=[Section(heading="Time of a call", parts=[*parts, table])],
        conditions=_conditions(conditions),
    )


def ddp_page(files: Sequence[tuple[str, dict[str, Any]]]) -> Page:
    """Makes the page of `bench ddp`, one chart per file."""
    parts, rows = [], []
    for name, data in files:
        ahead = f"{name}: " if len(files) > 1 else ""
        conditions = data["conditions"]
        floors = [("no communication", conditions.get("no_sync_s")), ("the link's rate", conditions.get("line_s"))]
        marks = [Mark(x=value, text=text) for text, value in floors if value is not None]
        title = f"{ahead}a step of {conditions['params'] / 1e6:.3g} M parameters"
        parts.append(_bars(title, "median time of a step, s", data["results"], marks))
        rows += [(f"{ahead}{result['backend']}", *_cells(result)) for result in data["results"]]
    conditions, results = files[0][1]["conditions"], files[0][1]["results"]
    verdict, tone = _beside(results, "a step takes", conditions)
    table = Table(
        title="All results",
        headings=("", "median", "99th percentile", "worst", "arrived", "rounds"),
        rows=[*rows],
    )
    return Page(
        title="A training step against gloo",
        subtitle=f"{conditions['params'] / 1e6:.3g} M parameters on {_where(conditions)}",
        verdict=verdict,
        tone=tone,
        facts=_facts(results, conditions),
        sections=[Section(heading="Time of a step", parts=[*parts, table])],
        conditions=_conditions(conditions),
    )


def latency_page(files: Sequence[tuple[str, dict[str, Any]]]) -> Page:
    """Makes the page of `bench latency`: time against size."""
    series, rows = [], []
    names = [
        backend if len(files) == 1 else f"{backend} ({name})"
        for name, data in files
        for backend in dict.fromkeys(result["backend"] for result in data["results"])
    ]
    colours = colours_of(names)
    for name, data in files:
        for backend in dict.fromkeys(result["backend"] for result in data["results"]):
            own = [result for result in data["results"] if result["backend"] == backend]
            label = backend if len(files) == 1 else f"{backend} ({name})"
            x, y = [float(each["bytes"]) for each in own], [1e6 * each["median_s"] for each in own]
            high = [1e6 * each["p99_s"] for each in own]
            series.append(Series(name=label, colour=colours[label], x=x, y=[*y], low=y, high=high))
            rows += [
                (label, size_text(each["bytes"]), time_text(each["median_s"]), time_text(each["p99_s"])) for each in own
            ]
    data = files[0][1]
    smallest = {result["backend"]: result for result in reversed(data["results"])}
    ours, peer = smallest.get("storm"), smallest.get("gloo")
    verdict, tone = "Median times by size.", "plain"
    if ours and peer:
        ratio = peer["median_s"] / ours["median_s"]
        verdict = f"An all-reduce of {size_text(ours['bytes'])} takes {time_text(ours['median_s'])}; gloo takes "
        verdict += f"{time_text(peer['median_s'])} ({times(ratio) if ratio >= 1 else f'{ratio:.2f}x'} as long)."
        tone = "good" if ratio > 1.05 else "bad" if ratio < 0.95 else "plain"
    chart = LineChart(
        title="Time of an all-reduce by size",
        x_label="bytes",
        y_label="median, µs; bands reach to the 99th percentile",
        series=series,
        x_log=True,
        y_log=True,
    )
    table = Table(title="All results", headings=("", "size", "median", "99th percentile"), rows=[*rows])
    idle = data.get("idle_cpu_percent") or {}
    facts = [Fact(figure=f"{value:.2g} %", text=f"of a core while {name} idles") for name, value in idle.items()]
    return Page(
        title="Small tensors against gloo",
        subtitle=f"{ranks_of(data['conditions'])} ranks, loopback",
        verdict=verdict,
        tone=tone,
        facts=facts,
        sections=[Section(heading="Time by size", parts=[chart, table])],
        conditions=_conditions(data["conditions"]),
    )


def sweep_page(files: Sequence[tuple[str, dict[str, Any]]]) -> Page:
    """Makes the page of `bench sweep`: every network as a row, times over the ideal as cells."""
    parts: list[Grid] = []
    faster = compared = 0
    for name, data in files:
        backends = data["conditions"]["backends"]
        rows = []
        for point in data["points"]:
            found = {result["backend"]: result for result in point["results"] or ()}
            where = f"{network_text(point['requested'])}, {requested_loss_text(point)}"
            cells = [_ratio_cell(found.get(backend)) for backend in backends]
            rows.append((where, cells if found else [(str(point["error"] or "no result")[:60], -1.0), *cells[1:]]))
            peers = [each for key, each in found.items() if key.startswith("gloo")]
            ours = [each for key, each in found.items() if key.startswith("storm")]
            if peers and ours:
                compared += 1
                faster += min(each["median_s"] for each in ours) < min(each["median_s"] for each in peers)
        title = "Median time over the ideal" + (f": {name}" if len(files) > 1 else "")
        note = "1 is as fast as the link allows; > means that it timed out."
        parts.append(Grid(title=title, corner="network", columns=list(backends), rows=rows, note=note))
    conditions = files[0][1]["conditions"]
    return Page(
        title="All-reduce over many networks",
        subtitle=f"{ranks_of(conditions)} ranks",
        verdict=f"stormtorch was the fastest on {faster} of {compared} networks; gloo on {compared - faster}.",
        tone="good" if faster > compared / 2 else "bad",
        sections=[Section(heading="Every network", parts=[*parts])],
        conditions=_conditions(conditions),
    )


def _ratio_cell(result: dict[str, Any] | None) -> tuple[str, float]:
    if result is None or not result.get("ideal_s"):
        return "-", 0.0
    ratio = result["median_s"] / result["ideal_s"]
    tone = max(1.0 - (ratio - 1.0) / 1.5, -1.0)
    return (">" if result["gave_up"] else "") + (f"{ratio:.2f}" if ratio < 9.95 else f"{ratio:.0f}"), tone


def _bars(title: str, label: str, results: Sequence[dict[str, Any]], marks: list[Mark]) -> BarChart:
    colours = colours_of([result["backend"] for result in results])
    bars = [
        Bar(
            name=result["backend"],
            value=result["median_s"],
            text=time_text(result["median_s"]),
            colour=colours[result["backend"]],
            at_least=_bound(result),
            dots=[float(each) for each in result.get("times_s") or ()],
        )
        for result in results
    ]
    return BarChart(title=title, label=label, bars=bars, marks=marks, note="Bars are medians, dots are rounds.")


def _ideal(results: Sequence[dict[str, Any]]) -> list[Mark]:
    ideal = next((result.get("ideal_s") for result in results), None)
    return [] if ideal is None else [Mark(x=ideal, text="ideal")]


def _bound(result: dict[str, Any]) -> bool:
    return bool(result["gave_up"]) and result["rounds"] <= 2


def _cells(result: dict[str, Any]) -> tuple[str | int, ...]:
    above = "> " if _bound(result) else ""
    return (
        above + time_text(result["median_s"]),
        time_text(result["p99_s"]),
        time_text(result["worst_s"]),
        percent(result["arrived"]),
        result["rounds"],
    )


def _beside(results: Sequence[dict[str, Any]], what: str, conditions: dict[str, Any]) -> tuple[str, str]:
    """Compares the fastest of ours with the fastest peer."""
    ours = [result for result in results if result["backend"].startswith("storm")]
    peers = [result for result in results if result["backend"].startswith("gloo")]
    where = where_text(conditions)
    if not ours or not peers:
        return f"Over {where}: {len(results)} backends were measured, without one to compare them with.", "plain"
    best = min(ours, key=lambda result: float(result["median_s"]))
    peer = min(peers, key=lambda result: float(result["median_s"]))
    ratio = peer["median_s"] / best["median_s"]
    bound = "more than " if _bound(peer) else ""
    text = f"Over {where}, {what} in {time_text(best['median_s'])} with {best['backend']}; "
    if what.endswith("takes"):
        text = f"Over {where}, {what} {time_text(best['median_s'])} with {best['backend']}; "
    if ratio >= 1:
        text += f"{peer['backend']} takes {bound}{time_text(peer['median_s'])} ({bound}{times(ratio)} as long)."
    else:
        text += (
            f"{peer['backend']} is faster, {time_text(peer['median_s'])}: stormtorch takes {times(1 / ratio)} as long."
        )
    return text, "good" if ratio > 1.05 else "bad" if ratio < 0.95 else "plain"


def _facts(results: Sequence[dict[str, Any]], conditions: dict[str, Any]) -> list[Fact]:
    colours = colours_of([result["backend"] for result in results])
    ours = sorted((each for each in results if not each["backend"].startswith("gloo")), key=_median)
    peers = [each for each in results if each["backend"].startswith("gloo")]
    facts = [
        Fact(
            figure=("> " if _bound(result) else "") + time_text(result["median_s"]),
            text=f"{result['backend']}, median",
            colour=colours[result["backend"]],
        )
        for result in [*ours[:1], *peers, *ours[1:]][:4]
    ]
    lost = conditions.get("loss_measured")
    return facts + ([Fact(figure=f"{100 * lost:.1f} %", text="of the packets lost, as measured")] if lost else [])


def _median(result: dict[str, Any]) -> float:
    return float(result["median_s"])


def _where(conditions: dict[str, Any]) -> str:
    return f"{ranks_of(conditions)} ranks, {where_text(conditions)}"


def _conditions(conditions: dict[str, Any]) -> list[tuple[str, str]]:
    keys = ("times", "barrier", "order", "ideal", "model", "step", "dtype", "chunk_bytes", "patience_s")
    rows = [(key.replace("_", " "), str(conditions[key])) for key in keys if conditions.get(key) is not None]
    network = [("network", where_text(conditions))] if "network" in conditions else []
    return [*network, *rows, *machine_rows(conditions)]

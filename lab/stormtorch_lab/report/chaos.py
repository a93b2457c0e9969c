"""Page of `stormtorch chaos`: faults, recovery of the training, and invariants."""

from collections.abc import Sequence
from typing import Any

from stormtorch_lab.report.parts import Event, Fact, LineChart, Page, Section, Series, Table, Timeline
from stormtorch_lab.report.text import machine_rows, seconds

_COLOURS = {
    "kill": "vermilion",
    "pause": "orange",
    "cut": "purple",
    "link": "blue",
    "outage": "ink",
    "partition": "green",
    "storm": "grey",
    "mtu": "yellow",
    "join": "green",
    "leave": "orange",
}
_EVERYWHERE = ("outage", "storm")


def chaos_page(files: Sequence[tuple[str, dict[str, Any]]]) -> Page:
    """Makes the page of one run, or of several below each other."""
    sections = []
    for name, data in files:
        sections += _sections(data, f": {name}" if len(files) > 1 else "")
    data = files[0][1]
    passed = [bool(each["passed"]) for _, each in files]
    verdict = str(data["verdict"])
    if len(files) > 1:
        verdict = f"{sum(passed)} of {len(passed)} runs passed."
    settings = data["settings"]
    return Page(
        title="Hosts and links that fail",
        subtitle=f"{settings['hosts']} hosts train for {settings['minutes']:g} minutes, seed {settings['seed']}",
        verdict=verdict[:1].upper() + verdict[1:],
        tone="good" if all(passed) else "bad",
        facts=_facts(data) if len(files) == 1 else [],
        sections=sections,
        conditions=machine_rows(data.get("conditions", {})),
    )


def _facts(data: dict[str, Any]) -> list[Fact]:
    facts = [
        Fact(figure=str(len(data["timeline"])), text="faults struck"),
        Fact(figure=f"{data['steps']:,}", text="steps made"),
        Fact(figure=str(data["views"]), text="different sets of members"),
    ]
    pauses = [each["pause_worst_s"] for each in data["kinds"] if each.get("pause_worst_s") is not None]
    if pauses:
        facts.append(Fact(figure=seconds(max(pauses)), text="longest pause of the training"))
    return facts


def _sections(data: dict[str, Any], ahead: str) -> list[Section]:
    curve = [(float(t), float(step)) for t, step in data["curve"]]
    end = max([t for t, _ in curve] + [float(each["ended_s"] or 0.0) for each in data["timeline"]], default=1.0)
    hosts = sorted({int(each["host"]) for each in data["hosts"]})
    events = []
    for each in data["timeline"]:
        kind = str(each["kind"])
        begin = float(each["began_s"] if each.get("began_s") is not None else each["at_s"])
        until = float(each["ended_s"] if each.get("ended_s") is not None else begin)
        struck = [f"h{host}" for host in (hosts if kind in _EVERYWHERE else each["hosts"])]
        colour = _COLOURS.get(kind, "grey")
        events += [Event(lane=lane, begin=begin, end=until, text=kind, colour=colour) for lane in struck]
    steps = LineChart(
        title="Step of the training",
        x_label="seconds",
        y_label="step",
        series=[Series(name="step", colour="blue", x=[t for t, _ in curve], y=[step for _, step in curve])],
        note="The line is flat while training is stalled.",
    )
    lanes = Timeline(title="Faults by host", lanes=[f"h{host}" for host in hosts], seconds=end, events=events)
    checks = Table(
        title="Invariants",
        headings=("", "", "problems"),
        rows=[
            (str(check["name"]), "held" if check["holds"] else "violated", "; ".join(map(str, check["problems"])))
            for check in data["checks"]
        ],
    )
    kinds = Table(
        title="Recovery by kind of fault",
        headings=("", "count", "median pause", "worst pause", "median return", "worst return"),
        rows=[
            (
                str(each["kind"]),
                int(each["count"]),
                *(_time(each.get(key)) for key in ("pause_median_s", "pause_worst_s")),
                *(_time(each.get(key)) for key in ("return_median_s", "return_worst_s")),
            )
            for each in data["kinds"]
        ],
    )
    return [
        Section(heading=f"The run{ahead}", parts=[steps, lanes, kinds]),
        Section(heading=f"Invariants{ahead}", parts=[checks]),
    ]


def _time(value: float | None) -> str:
    return "" if value is None else seconds(value)

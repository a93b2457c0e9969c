"""Terminal screen of `stormtorch watch`, and its single line for logs."""

import time
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from stormtorch.cli.terminal.screen import Fitting, new_table
from stormtorch.telemetry.text import rate_text, time_text

_STYLES = {"bad": "bold red", "warn": "bold yellow", "good": "bold green", "idle": "bold"}
_STATES = {"running": "green", "failed": "red", "gone": "red", "silent": "red"}
_PARTS = (
    ("computes", "blue"),
    ("waits for the slowest rank", "yellow"),
    ("waits for the network", "red"),
    ("view", "magenta"),
)
_BAR = 30
_MOST_CELLS = 12
_MOST_RANKS = 16
_MOST_NOTES = 6


def screen(data: dict[str, Any], *, keys: bool = False) -> Group:
    """Returns the state of a job for a terminal. Texts of records are never interpreted as markup."""
    parts: list[RenderableType] = [_head(data), _verdict(data), _numbers(data)]
    if data["ranks"]:
        parts += [_links(data), _ranks(data)]
    if data["notes"]:
        parts.append(_notes(data))
    if keys:
        parts.append(Text("q quits", style="dim"))
    return Group(*parts)


def line(data: dict[str, Any]) -> str:
    """Returns the state of a job on one line."""
    cost, step = data["cost"], data["job"].get("step")
    parts = [time.strftime("%H:%M:%S", time.localtime(data["now"])), data["state"]]
    if step is not None:
        parts += [
            f"{step + 1:,} steps",
            f"{_time(cost['step_s'])} a step",
            f"{_percent(cost['network_share'])} network",
        ]
        parts.append(f"{_percent(cost['link_loss'])} lost")
    first = data["verdict"][0]
    remedy = f": {first['remedy']}" if first["remedy"] else ""
    return f"{', '.join(parts)}. {first['text']}{remedy}."


def _head(data: dict[str, Any]) -> Text:
    job = data["job"]
    words = [data["state"]]
    if job:
        words.append(f"{len(data['ranks'])} ranks on {job['hosts']} host{'s' * (job['hosts'] > 1)}")
        words.append(f"{job['step'] + 1:,} steps" if job["step"] is not None else "no step yet")
        words.append(job["policy"])
    return Text.assemble(("stormtorch watch  ", "bold"), (" · ".join([*words, data["source"]]), "dim"), overflow="fold")


def _verdict(data: dict[str, Any]) -> Panel:
    first, *others = data["verdict"]
    style = _STYLES[first["level"]]
    text = Text(f"{first['text']}.", style=style)
    if first["remedy"]:
        text.append(f"\n→ {first['remedy'][0].upper()}{first['remedy'][1:]}.", style="default")
    for each in others:
        remedy = f": {each['remedy']}" if each["remedy"] else ""
        text.append(f"\n• {each['text']}{remedy}.", style="dim")
    return Panel(text, border_style=style.split()[-1] if first["level"] != "idle" else "dim", box=box.ROUNDED)


def _numbers(data: dict[str, Any]) -> Text:
    cost = data["cost"]
    if not cost["step_s"]:
        return Text("")
    share = cost["line_share"]
    parts = [
        ("a step ", _time(cost["step_s"])),
        ("network ", _percent(cost["network_share"])),
        ("slowest rank ", _percent(cost["straggler_share"])),
        ("links lose ", _percent(cost["link_loss"])),
        ("missing ", _percent(cost["lost"])),
        ("sends ", _rate(cost["sent"]) + (f" ({_percent(min(1.0, share))} of its link)" if share is not None else "")),
        ("batch that counts ", _percent(cost["effective_batch"])),
    ]
    if cost["more_steps"] is not None:
        parts.append(("extra steps (theory) ", _percent(cost["more_steps"])))
    text = Text()
    for name, value in parts:
        # A name and its value stay on one line.
        text.append(name.replace(" ", "\N{NO-BREAK SPACE}"), style="dim")
        text.append(value.replace(" ", "\N{NO-BREAK SPACE}") + "   ")
    return text


def _links(data: dict[str, Any]) -> RenderableType:
    matrix = data["matrix"]
    if matrix is None or not 2 <= len(matrix["ranks"]) <= _MOST_CELLS:
        return _worst(data)
    blamed = {tuple(link) for link in data["verdict"][0]["links"]}
    table = new_table("loss of links in %: rows receive, columns send", lines=False)
    table.add_column("", style="dim")
    for rank in matrix["ranks"]:
        table.add_column(str(rank), justify="right", style="dim", min_width=5)
    for receiver, row in zip(matrix["ranks"], matrix["loss"], strict=True):
        cells = [
            _cell(value, (sender, receiver) in blamed) if sender != receiver else Text("")
            for sender, value in zip(matrix["ranks"], row, strict=True)
        ]
        table.add_row(str(receiver), *cells)
    sides = Table.grid(padding=(0, 4))
    sides.add_row(table, _worst(data))
    return Fitting(sides, Group(table, _worst(data)), _worst(data))


def _worst(data: dict[str, Any]) -> Table:
    table = new_table("worst links first", lines=False)
    for name in ("from → to", "loss", "round trip", "rate"):
        table.add_column(name, justify="left" if "→" in name else "right", style="default", header_style="dim")
    for link in data["worst"][: min(8, max(3, len(data["ranks"])))]:
        rate = "free" if link["rate"] is None else _rate(link["rate"])
        table.add_row(f"{link['sender']} → {link['receiver']}", _percent(link["loss"]), _time(link["rtt"]), rate)
    return table


def _cell(value: float | None, blamed: bool) -> Text:
    if value is None:
        return Text("·", style="dim")
    # The same colour thresholds as the web page: unnoticed, noticeable, bad.
    style = "bold red" if value >= 0.05 else "yellow" if value >= 0.005 else "default"
    return Text(f"{100 * value:.1f}", style=f"{style} reverse" if blamed else style)


def _ranks(data: dict[str, Any]) -> Fitting:
    """The table of ranks. A narrow terminal first gets shorter bars, then fewer columns."""
    forms = [_ranks_table(data, bar, ()) for bar in (_BAR, 20, 12)]
    gone = ("overflow", "cores", "host", "step")
    forms += [_ranks_table(data, 10, gone[: count + 1]) for count in range(len(gone))]
    return Fitting(*forms, _ranks_table(data, 0, gone))


def _ranks_table(data: dict[str, Any], bar: int, without: Sequence[str]) -> Table:
    table = new_table("where a step goes", lines=False)
    columns = ("rank", "host", "state", "step", "", "a step", "lost", "cores", "overflow")
    shown = [name for name in columns if name not in without and (name or bar)]
    for name in shown:
        right = name in ("step", "a step", "lost", "cores", "overflow")
        table.add_column(name, justify="right" if right else "left", header_style="dim", no_wrap=True)
    longest = max((sum(each["split"]) for each in data["ranks"] if each["split"]), default=0.0)
    ranks = sorted(data["ranks"], key=lambda each: -(each["split"] or [0.0])[0])[:_MOST_RANKS]
    for each in sorted(ranks, key=lambda each: each["rank"]):
        cells: tuple[str | Text, ...] = (
            str(each["rank"]),
            Text(each["host"][:24]),
            Text(each["state"], style=_STATES.get(each["state"], "dim")),
            "–" if each["step"] is None else f"{each['step']:,}",
            _bar(each["split"], longest, bar),
            "–" if not each["split"] else _time(sum(each["split"])),
            _percent(each["lost"]),
            "–" if each["cores"] is None else f"{each['cores']:.2f}",
            Text(f"{each['overflow']:,.0f}", style="yellow" if each["overflow"] else "dim"),
        )
        table.add_row(*(cell for name, cell in zip(columns, cells, strict=True) if name in shown))
    legend = Text()
    for name, colour in _PARTS[:3]:
        legend.append("█ ", style=colour).append(f"{name}  ", style="dim")
    if len(data["ranks"]) > _MOST_RANKS:
        legend.append(f"the {_MOST_RANKS} of {len(data['ranks'])} ranks that compute longest", style="dim")
    table.caption = legend
    return table


def _bar(split: list[float] | None, longest: float, length: int) -> Text:
    text = Text()
    if split and longest > 0.0:
        for seconds, (_, colour) in zip(split, _PARTS, strict=True):
            text.append("█" * round(length * seconds / longest), style=colour)
    return text


def _notes(data: dict[str, Any]) -> Table:
    table = new_table("timeline", lines=False)
    table.show_header = False
    for _ in range(3):
        table.add_column()
    for note in data["notes"][-_MOST_NOTES:]:
        step = "" if note["step"] is None else f"step {note['step']:,}"
        when = time.strftime("%H:%M:%S", time.localtime(note["time"]))
        table.add_row(
            Text(when, style="dim"), Text(step, style="dim"), Text.assemble(note["text"], (f" {note['who']}", "dim"))
        )
    return table


def _percent(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{100 * value:.0f} %" if value >= 0.0995 or value == 0 else f"{100 * value:.2g} %"


def _time(value: float | None) -> str:
    return "–" if value is None else time_text(value)


def _rate(bytes_per_s: float | None) -> str:
    return "–" if bytes_per_s is None else rate_text(8 * bytes_per_s)

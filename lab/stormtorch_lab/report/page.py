"""HTML of a report: one self-contained file without network requests, readable without scripts and by screen readers.

Text from result files is escaped, also inside the data for scripts, and the page's content security policy forbids
every request.
"""

import json
import math
from dataclasses import asdict
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

from stormtorch.telemetry.json_files import without_nan
from stormtorch_lab.report.parts import BarChart, Cell, Grid, LineChart, Page, PageElement, Section, Table, Timeline

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; base-uri 'none'"
"""Content security policy: the page may not load anything."""
_TABLE_ROWS = 2000


def page_html(page: Page) -> str:
    """Writes a page as HTML."""
    sections = "".join(_section(section, number) for number, section in enumerate(page.sections))
    charts = [asdict(part) for part in page.parts if isinstance(part, LineChart)]
    facts = "".join(
        f'<li><b class="c-{_word(fact.colour)}">{escape(fact.figure)}</b><span>{escape(fact.text)}</span></li>'
        for fact in page.facts
    )
    conditions = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in page.conditions
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(page.title)}: {escape(page.verdict[:120])}</title>
<style>{_asset("stormtorch.watch", "assets/uplot/uPlot.min.css")}</style>
<style>{_asset("stormtorch_lab.report", "assets/page.css")}</style>
</head>
<body>
<a class="skip" href="#verdict">Skip to the verdict</a>
<main>
<header>
<p class="kicker">{escape(page.title)}</p>
<h1 id="verdict" class="tone-{_word(page.tone)}">{escape(page.verdict)}</h1>
<p class="subtitle">{escape(page.subtitle)}</p>
</header>
{f'<ul class="facts">{facts}</ul>' if facts else ""}
{sections}
<footer>
<h2>Conditions</h2>
<dl>{conditions}</dl>
<p>Made by stormtorch from measured results. This file makes no network requests.</p>
</footer>
</main>
<script type="application/json" id="charts">{_script_json(charts)}</script>
<script>{_asset("stormtorch.watch", "assets/uplot/uPlot.iife.min.js")}</script>
<script>{_asset("stormtorch_lab.report", "assets/page.js")}</script>
</body>
</html>
"""


@cache
def _asset(package: str, path: str) -> str:
    return files(package).joinpath(path).read_text(encoding="utf-8")


def _script_json(data: Any) -> str:
    """JSON that cannot close the script element around it."""
    text = json.dumps(without_nan(data), ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _word(text: str) -> str:
    """A CSS class name; other text could break out of its attribute."""
    return "".join(letter for letter in text if letter.isalnum() or letter == "-")


def _section(section: Section, number: int) -> str:
    text = f"<p>{escape(section.text)}</p>" if section.text else ""
    parts = "".join(_part(part) for part in section.parts)
    heading = f'<h2 id="s{number}">{escape(section.heading)}</h2>'
    return f'<section aria-labelledby="s{number}">{heading}{text}{parts}</section>\n'


def _part(part: PageElement) -> str:
    if isinstance(part, Table):
        return f'<div class="table">{_table(part, caption=True)}{_note(part.note)}</div>'
    if isinstance(part, Grid):
        return f'<div class="table">{_grid(part)}{_note(part.note)}</div>'
    drawn = (
        _lines(part) if isinstance(part, LineChart) else _bars(part) if isinstance(part, BarChart) else _timeline(part)
    )
    table = part.table()
    rows = len(table.rows)
    return (
        f"<figure><figcaption>{escape(part.title)}</figcaption>{drawn}{_note(part.note)}"
        f"<details><summary>Figures as a table ({rows} rows)</summary>"
        f'<div class="table">{_table(table)}</div></details></figure>'
    )


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>' if text else ""


def _lines(chart: LineChart) -> str:
    names = ", ".join(each.name for each in chart.series)
    label = f"Line chart of {chart.y_label} against {chart.x_label}, of {names}. The table below has the figures."
    return (
        f'<div class="plot" role="img" aria-label="{escape(label)}">'
        '<noscript><p class="note">Charts need scripts; the table below has the figures.</p></noscript></div>'
    )


def _bars(chart: BarChart) -> str:
    values = [bar.value for bar in chart.bars]
    marks = [mark.x for mark in chart.marks if mark.x is not None]
    most = max([*values, *marks, 0.0])
    dotted = [dot for bar in chart.bars for dot in bar.dots if math.isfinite(dot)]
    # One outlier must not make all bars short: dots far beyond the longest bar are drawn at the end.
    high = max([most, *(dot for dot in dotted if dot <= 1.5 * most)])
    low = min([*values, *dotted, 0.0])
    span = (high - low) or 1.0

    def at(value: float) -> float:
        return 100 * (min(max(value, low), high) - low) / span

    zero = at(0.0)
    lines = "".join(
        f'<i class="mark" style="left:{at(mark.x):.2f}%"><span>{escape(mark.text)}</span></i>'
        for mark in chart.marks
        if mark.x is not None
    )
    rows = []
    for bar in chart.bars:
        begin, end = sorted((zero, at(bar.value)))
        dots = "".join(f'<i style="left:{at(dot):.2f}%"></i>' for dot in bar.dots[:500] if math.isfinite(dot))
        rows.append(
            f'<div class="bar"><span class="name">{escape(bar.name)}</span>'
            f'<span class="track c-{_word(bar.colour)}"><b style="left:{begin:.2f}%;width:{max(end - begin, 0.3):.2f}%"'
            f"{' class=open' if bar.at_least else ''}></b>{dots}</span>"
            f'<span class="value">{"&gt; " if bar.at_least else ""}{escape(bar.text)}</span></div>'
        )
    return (
        f'<div class="bars" role="img" aria-label="{escape(chart.label)}. The table below has the figures.">'
        f'{"".join(rows)}<div class="bar scale"><span class="name"></span><span class="track">{lines}</span>'
        f'<span class="value"></span></div></div><p class="axis">{escape(chart.label)}</p>'
    )


def _timeline(chart: Timeline) -> str:
    span = chart.seconds or 1.0
    rows = []
    kinds = {each.text: each.colour for each in chart.events}
    keys = "".join(f'<li class="c-{_word(ink)}"><span>{escape(text)}</span></li>' for text, ink in kinds.items())
    for lane in chart.lanes:
        events = "".join(
            f'<b class="c-{_word(each.colour)}" style="left:{100 * each.begin / span:.2f}%;'
            f'width:{max(100 * (each.end - each.begin) / span, 0.6):.2f}%" title="{escape(each.text)}, '
            f'{each.begin:.1f} to {each.end:.1f} s">{_inside(each.text, (each.end - each.begin) / span)}</b>'
            for each in chart.events
            if each.lane == lane
        )
        rows.append(
            f'<div class="lane"><span class="name">{escape(lane)}</span><span class="track">{events}</span></div>'
        )
    return (
        f'<ul class="keys">{keys}</ul>'
        f'<div class="timeline" role="img" aria-label="{escape(chart.title)}. The table below has the figures.">'
        f'{"".join(rows)}</div><p class="axis">0 to {span:.0f} seconds</p>'
    )


def _inside(text: str, share: float) -> str:
    """The label on an event, if it fits."""
    return f"<span>{escape(text)}</span>" if share > 0.01 * (len(text) + 2) else ""


def _table(table: Table, *, caption: bool = False) -> str:
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in table.headings)
    rows = "".join(
        "<tr>" + "".join(_cell(cell, first=index == 0) for index, cell in enumerate(row)) + "</tr>"
        for row in table.rows[:_TABLE_ROWS]
    )
    left = len(table.rows) - _TABLE_ROWS
    more = (
        f'<tr><td colspan="{len(table.headings)}">{left} more rows: --csv writes them all</td></tr>' if left > 0 else ""
    )
    title = f"<caption>{escape(table.title)}</caption>" if caption else ""
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{rows}{more}</tbody></table>"


def _cell(cell: Cell, *, first: bool) -> str:
    text = escape(cell_text(cell))
    if first:
        return f'<th scope="row">{text}</th>'
    number = isinstance(cell, int | float) or (text[:1].isdigit() or text[:1] in "-+&")
    return f'<td class="number">{text}</td>' if number and len(text) < 24 else f"<td>{text}</td>"


def cell_text(cell: Cell) -> str:
    """Formats a table cell."""
    if cell is None:
        return ""
    return f"{cell:.5g}" if isinstance(cell, float) else str(cell)


def _grid(grid: Grid) -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in (grid.corner, *grid.columns))
    rows = []
    for name, cells in grid.rows:
        shown = "".join(
            f'<td class="number {"good" if tone >= 0 else "bad"}" style="--tone:{min(abs(tone), 1.0):.2f}">'
            f"{escape(text)}</td>"
            for text, tone in cells
        )
        rows.append(f'<tr><th scope="row">{escape(name)}</th>{shown}</tr>')
    return (
        f'<table class="grid"><caption>{escape(grid.title)}</caption><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )

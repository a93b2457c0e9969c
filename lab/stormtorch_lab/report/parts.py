"""Parts of a report: charts, tables and the page that holds them, as plain data.

Every chart also yields a table, shown beside it for accessibility and written as CSV.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

Cell: TypeAlias = str | float | int | None

FURTHER = ("sky", "purple", "yellow", "green", "orange", "grey")
"""Colours for names without a fixed one, in order."""
_COLOURS = {
    "storm": "blue",
    "storm-drift": "blue",
    "storm-alone": "sky",
    "storm-lossy": "green",
    "gloo": "vermilion",
    "gloo-bbr": "vermilion",
    "gloo-cubic": "purple",
    "lossless": "grey",
    "plain": "orange",
    "lead": "blue",
    "model-averaging": "green",
    "gradient-averaging": "purple",
}


def colours_of(names: Sequence[str]) -> dict[str, str]:
    """Chooses a colour for each name: common names have fixed colours, and no two names share one."""
    found: dict[str, str] = {}
    for name in names:
        own = _COLOURS.get(name)
        free = [colour for colour in FURTHER if colour not in found.values()]
        found[name] = own if own and own not in found.values() else free[0] if free else FURTHER[len(found) % 6]
    return found


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table, whose first column names its rows."""

    title: str
    headings: tuple[str, ...]
    rows: list[tuple[Cell, ...]]
    note: str = ""

    def table(self) -> "Table":
        """Returns this table."""
        return self


@dataclass(frozen=True, kw_only=True)
class Series:
    """A line of a chart, with a band around it if `low` and `high` are given."""

    name: str
    colour: str
    x: list[float]
    y: list[float | None]
    low: list[float] | None = None
    high: list[float] | None = None
    dashed: bool = False


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A reference line across a chart, with a label."""

    text: str
    x: float | None = None
    y: float | None = None
    colour: str = "ink"


@dataclass(frozen=True, kw_only=True)
class LineChart:
    """A chart of lines."""

    title: str
    x_label: str
    y_label: str
    series: list[Series]
    marks: list[Mark] = field(default_factory=list)
    note: str = ""
    x_log: bool = False
    y_log: bool = False
    from_zero: bool = False
    """Whether the vertical axis begins at zero."""

    def table(self) -> Table:
        """Returns all points, one per row."""
        bands = any(each.low is not None for each in self.series)
        rows: list[tuple[Cell, ...]] = []
        for each in self.series:
            for index, (x, y) in enumerate(zip(each.x, each.y, strict=True)):
                row: tuple[Cell, ...] = (each.name, x, y)
                if bands:
                    row += (each.low[index] if each.low else None, each.high[index] if each.high else None)
                rows.append(row)
        headings = ("", self.x_label, self.y_label) + (("lowest", "highest") if bands else ())
        return Table(title=self.title, headings=headings, rows=rows)


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A bar of a chart."""

    name: str
    value: float
    text: str
    """Formatted value."""
    colour: str
    at_least: bool = False
    """Whether the value is a lower bound, as the measurement timed out."""
    dots: list[float] = field(default_factory=list)
    """Single measurements behind the value."""


@dataclass(frozen=True, kw_only=True)
class BarChart:
    """A chart of horizontal bars."""

    title: str
    label: str
    """Meaning of the values, with their unit."""
    bars: list[Bar]
    marks: list[Mark] = field(default_factory=list)
    note: str = ""

    def table(self) -> Table:
        """Returns one row per bar."""
        rows: list[tuple[Cell, ...]] = [
            (bar.name, bar.value, f"at least {bar.text}" if bar.at_least else bar.text) for bar in self.bars
        ]
        return Table(title=self.title, headings=("", self.label, "as text"), rows=rows)


@dataclass(frozen=True, kw_only=True)
class Event:
    """An event with a start and an end on one lane."""

    lane: str
    begin: float
    end: float
    text: str
    colour: str


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A chart of events on lanes, over seconds."""

    title: str
    lanes: list[str]
    seconds: float
    events: list[Event]
    note: str = ""

    def table(self) -> Table:
        """Returns one row per event."""
        rows: list[tuple[Cell, ...]] = [(each.lane, each.begin, each.end, each.text) for each in self.events]
        return Table(title=self.title, headings=("", "from, s", "to, s", "what"), rows=rows)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A table of numbers whose cells are coloured: `tone` runs from -1, bad, over 0 to 1, good."""

    title: str
    corner: str
    columns: list[str]
    rows: list[tuple[str, list[tuple[str, float]]]]
    note: str = ""

    def table(self) -> Table:
        """Returns the texts of all cells."""
        rows: list[tuple[Cell, ...]] = [(name, *(text for text, _ in cells)) for name, cells in self.rows]
        return Table(title=self.title, headings=(self.corner, *self.columns), rows=rows)


PageElement: TypeAlias = LineChart | BarChart | Grid | Timeline | Table


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A key figure, in large print."""

    figure: str
    text: str
    colour: str = "ink"


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading, some sentences and parts."""

    heading: str
    text: str = ""
    parts: list[PageElement] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Page:
    """A report."""

    title: str
    verdict: str
    """The main result in one plain sentence."""
    tone: str = "plain"
    """"good", "bad", "warn" or "plain"."""
    subtitle: str = ""
    facts: list[Fact] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)
    conditions: list[tuple[str, str]] = field(default_factory=list)
    """Conditions under which it was measured."""

    @property
    def parts(self) -> list[PageElement]:
        """All parts in order."""
        return [part for section in self.sections for part in section.parts]

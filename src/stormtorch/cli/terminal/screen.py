"""Tables and progress bars in a terminal; without one, a line of progress every ten seconds."""

import contextlib
import copy
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.constrain import Constrain
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table
from rich.text import Text, TextType

from stormtorch.telemetry.progress import Advance

EVERY_S = 10.0
"""Seconds between two lines of progress without a terminal."""
# Gap between two columns of a table, if the width allows it.
_GAP = 2
# Least width of prose in a table, greatest width of its title and caption, and a width that means no limit.
_PROSE, _PAGE, _WIDE = 16, 100, 10_000


@contextlib.contextmanager
def progress_bar(total: int, start: str, *, unit: str = "rounds") -> Iterator[Advance]:
    """Shows a progress bar on standard error, so that tables can be piped; without a terminal, a line every ten
    seconds.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        with _progress_lines(total, start, unit, console) as advance:
            yield advance
        return
    narrow = console.width < 120
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", table_column=Column(ratio=1)),
        *([BarColumn(10 if narrow else 40)] if console.width >= 80 else []),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    # Few refreshes: the bar shares the cores with what is measured.
    with Progress(*columns, console=console, transient=True, refresh_per_second=4, expand=narrow) as bar:
        task = bar.add_task(start, total=total)

        def advance(what: str, done: int) -> None:
            bar.update(task, description=what, completed=done)

        yield advance


@contextlib.contextmanager
def progress_status(start: str) -> Iterator[Advance]:
    """Shows the current step on standard error: a spinner in a terminal, otherwise a line for each step."""
    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        with console.status(start) as status:
            yield lambda what, _done: status.update(what)
    else:
        console.print(start, markup=False, soft_wrap=True)
        yield lambda what, _done: console.print(what, markup=False, soft_wrap=True)


@contextlib.contextmanager
def _progress_lines(total: int, start: str, unit: str, console: Console) -> Iterator[Advance]:
    begun_s = time.monotonic()
    now = (start, 0)

    def advance(what: str, done: int) -> None:
        nonlocal now
        now = (what, done)

    def line() -> str:
        what, done = now
        passed_s = time.monotonic() - begun_s
        left = f", about {passed_s * (total - done) / done:.0f} s left" if 0 < done < total else ""
        return f"{what}: {done} of {total} {unit} after {passed_s:.0f} s{left}"

    with periodic_lines(line, console):
        yield advance


@contextlib.contextmanager
def periodic_lines(line: Callable[[], str], console: Console) -> Iterator[None]:
    """Prints a line every ten seconds while the block runs, for pipes and logs of CI. Empty lines are skipped."""
    done = threading.Event()

    def speak() -> None:
        while not done.wait(EVERY_S):
            if text := line():
                console.print(text, markup=False, highlight=False, soft_wrap=True)

    speaker = threading.Thread(target=speak, name="progress", daemon=True)
    speaker.start()
    try:
        yield
    finally:
        done.set()
        speaker.join(1.0)


def hanging_indent(head: str | tuple[str, str], text: str | tuple[str, str], console: Console) -> None:
    """Prints a head and prose with a hanging indent; without a terminal, on one line.

    Args:
        head: Text before the first line, with or without a style.
        text: Prose, with or without a style.
        console: Console to print to.
    """
    if not console.is_terminal:
        console.print(Text.assemble(head, text), soft_wrap=True)
        return
    grid = Table.grid()
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(Text.assemble(head), Text.assemble(text))
    console.print(grid)


def new_table(title: str, caption: str | Text | None = None, *, keys: int = 1, lines: bool = True) -> "FittingTable":
    """Makes a table that is never truncated, however narrow the terminal. All commands use it.

    Args:
        title: Text above it.
        caption: Text below it.
        keys: Number of leading columns that identify a row.
        lines: Whether there are horizontal lines above it, below it and under its headings.
    """
    table = FittingTable(box=box.HORIZONTALS if lines else None, pad_edge=False, title=title, caption=caption)
    table.keys = keys
    return table


class _ColumnWidth(NamedTuple):
    """Width that a column needs."""

    least: int
    broken: int
    """Least width if the heading is wrapped at spaces."""
    best: int


class FittingTable(Table):
    """A table that fits a narrow terminal without leaving anything out. It first wraps prose, then wraps headings and
    narrows gaps, then moves columns below, repeating the key columns.
    """

    keys = 1

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        available_width = options.max_width
        needs = [self._need(column, console, options.update(width=_WIDE)) for column in self.columns]
        if self.title:
            yield _annotation(self.title, "table.title", available_width)
        for chosen, gap in self._parts(needs, available_width):
            part = self._part(chosen, gap, self._widths(chosen, gap, needs, available_width))
            yield from super(FittingTable, part).__rich_console__(console, options)
        if self.caption:
            yield _annotation(self.caption, "table.caption", available_width)

    def _need(self, column: Column, console: Console, wide: ConsoleOptions) -> _ColumnWidth:
        cells = [Measurement.get(console, wide, cell) for cell in column.cells] or [Measurement(1, 1)]
        heading = Measurement.get(console, wide, column.header if self.show_header else "")
        longest = max(each.maximum for each in cells)
        least = longest if column.no_wrap else max(min(longest, _PROSE), *(each.minimum for each in cells))
        least, longest = (min(max(each, column.min_width or 1), column.max_width or each) for each in (least, longest))
        return _ColumnWidth(max(least, heading.maximum), max(least, heading.minimum), max(longest, heading.maximum))

    def _parts(self, needs: Sequence[_ColumnWidth], available_width: int) -> Iterator[tuple[list[int], int]]:
        """Groups of columns that fit side by side, and the gap between columns."""
        every = list(range(len(needs)))
        for gap in (_GAP, 1):
            if self._least(every, gap, needs) <= available_width:
                yield every, gap
                return
        shown = every[: self.keys]
        for index in every[self.keys :]:
            if len(shown) > self.keys and self._least([*shown, index], 1, needs) > available_width:
                yield shown, 1
                shown = shown[: self.keys]
            shown.append(index)
        yield shown, 1

    def _least(self, chosen: Sequence[int], gap: int, needs: Sequence[_ColumnWidth]) -> int:
        widths = sum(needs[index].broken if gap < _GAP else needs[index].least for index in chosen)
        return widths + self._between(chosen, gap)

    def _between(self, chosen: Sequence[int], gap: int) -> int:
        return gap * (len(chosen) - 1) + 2 * (self.box is not None)

    def _widths(
        self, chosen: Sequence[int], gap: int, needs: Sequence[_ColumnWidth], available_width: int
    ) -> dict[int, int]:
        widths = {index: needs[index].broken if gap < _GAP else needs[index].least for index in chosen}
        spare = available_width - sum(widths.values()) - self._between(chosen, gap)
        for index in sorted(chosen, key=lambda index: needs[index].best - widths[index]):
            more = needs[index].best - widths[index]
            if more > spare:  # only prose can use it
                more = 0 if self.columns[index].no_wrap else max(spare, 0)
            widths[index] += more
            spare -= more
        while spare < 0 and max(widths.values()) > 1:  # not even one column fits beside the keys: break words
            widths[max(widths, key=widths.__getitem__)] -= 1
            spare += 1
        return widths

    def _part(self, chosen: Sequence[int], gap: int, widths: Mapping[int, int]) -> "FittingTable":
        part = copy.copy(self)
        part.title = part.caption = None
        part.padding = (0, gap - (self.box is not None), 0, 0)  # a box has a gap of its own
        part.columns = [
            replace(self.columns[index], _index=number, width=widths[index], no_wrap=False, overflow="fold")
            for number, index in enumerate(chosen)
        ]
        return part


def _annotation(text: TextType, style: str, available_width: int) -> RenderableType:
    whole = Text.from_markup(text, style=style) if isinstance(text, str) else text
    return Constrain(whole, min(available_width, _PAGE))


class Fitting:
    """Shows the first of several forms of a table that fits; the last one if none does."""

    def __init__(self, *forms: RenderableType) -> None:
        self._forms = forms

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.update(width=_WIDE)
        for each in self._forms:
            if Measurement.get(console, wide, each).maximum <= options.max_width:
                yield each
                return
        yield self._forms[-1]

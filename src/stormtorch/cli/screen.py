"""Tables and progress in a terminal; where there is none, a line every ten seconds."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
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
from rich.table import Table

from stormtorch.results.progress import Advance

EVERY_S = 10.0
"""Seconds between two lines of progress where there is no terminal."""


@contextlib.contextmanager
def progress_bar(total: int, start: str, *, unit: str = "rounds") -> Iterator[Advance]:
    """Shows a bar on the standard error, so that tables can be piped; where that is no terminal, a line every ten
    seconds.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        with _progress_lines(total, start, unit, console) as advance:
            yield advance
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    # Few refreshes: the bar shares the cores with what is measured.
    with Progress(*columns, console=console, transient=True, refresh_per_second=4) as bar:
        task = bar.add_task(start, total=total)

        def advance(what: str, done: int) -> None:
            bar.update(task, description=what, completed=done)

        yield advance


@contextlib.contextmanager
def spoken_progress(start: str) -> Iterator[Advance]:
    """Says what is being done: by a spinner in a terminal, by a line for each step elsewhere, on the standard error."""
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

    with spoken(line, console):
        yield advance


@contextlib.contextmanager
def spoken(line: Callable[[], str], console: Console) -> Iterator[None]:
    """Prints a line every ten seconds while the block runs: pipes and logs of CI have no bars. An empty line is left
    out.
    """
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


def new_table(title: str, caption: str | None = None) -> Table:
    """Makes a table without vertical lines: it fits into 80 columns."""
    table = Table(title=title, caption=caption, box=box.HORIZONTALS, collapse_padding=True, pad_edge=False)
    table.title_justify = table.caption_justify = "left"
    return table


class Fitting:
    """Shows the first of several forms of a table that fits; the last one if none does."""

    def __init__(self, *forms: RenderableType) -> None:
        self._forms = forms

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.update(width=10_000, max_width=10_000)
        for each in self._forms:
            if Measurement.get(console, wide, each).maximum <= options.max_width:
                yield each
                return
        yield self._forms[-1]

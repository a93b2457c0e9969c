"""Tables and progress bars in a terminal."""

import contextlib
from collections.abc import Iterator

from rich import box
from rich.console import Console
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


@contextlib.contextmanager
def progress_bar(total: int, start: str, *, unit: str = "rounds") -> Iterator[Advance]:
    """Shows a bar on the standard error, so that tables can be piped; nothing where that is no terminal."""
    console = Console(stderr=True)
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
    bar = Progress(*columns, console=console, transient=True, refresh_per_second=4, disable=not console.is_terminal)
    with bar:
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


def new_table(title: str, caption: str | None = None) -> Table:
    """Makes a table without vertical lines: it fits into 80 columns."""
    table = Table(title=title, caption=caption, box=box.HORIZONTALS, collapse_padding=True, pad_edge=False)
    table.title_justify = table.caption_justify = "left"
    return table

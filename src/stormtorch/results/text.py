"""How measurements look in a terminal."""

import contextlib
from collections.abc import Callable, Iterator

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

Advance = Callable[[str, int], None]
"""Called with what is being measured and how many steps of all are done."""


def ignore_progress(_what: str, _done: int) -> None:
    """For callers that show no progress."""


@contextlib.contextmanager
def progress_bar(total: int, start: str, *, unit: str = "rounds") -> Iterator[Advance]:
    """A bar on the standard error, so that tables can be piped; nothing where that is no terminal."""
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


def new_table(title: str, caption: str | None = None) -> Table:
    """A table without vertical lines: it fits into 80 columns."""
    table = Table(title=title, caption=caption, box=box.HORIZONTALS, collapse_padding=True, pad_edge=False)
    table.title_justify = table.caption_justify = "left"
    return table


def crowding_text(hosts: int, cores: int) -> str:
    """A warning where ranks wait for cores and not for each other."""
    return f" {hosts} ranks share {cores} cores: waiting for a core is part of every time." if hosts > cores else ""


def time_text(seconds: float) -> str:
    """Three digits and a unit: "850 µs", "91.3 ms", "1.24 s"."""
    for scale, unit in ((1e6, "µs"), (1e3, "ms")):
        if round(seconds * scale, 1) < 1000:
            return f"{_three_digits(seconds * scale)} {unit}"
    return f"{_three_digits(seconds)} s"


def signed_time_text(seconds: float) -> str:
    """The same of a difference, which noise may turn round: "-12.0 ms"."""
    return ("-" if seconds < 0 else "") + time_text(abs(seconds))


def ratio_text(value: float) -> str:
    """A ratio with three digits or more: "0.97", "12.3"."""
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}"


def share_text(fraction: float) -> str:
    """Percent; 100 % only if nothing is missing."""
    return "100 %" if fraction == 1.0 else f"{min(fraction * 100, 99.99):.2f} %"


def loss_text(fraction: float) -> str:
    """Percent of what may well be nothing."""
    return f"{fraction * 100:.1f} %" if fraction >= 0.01 or fraction == 0.0 else f"{fraction * 100:.2g} %"


def size_text(size_bytes: int) -> str:
    """Decimal units: "4 KB", "25 MB"."""
    for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.3g} {unit}"
    return f"{size_bytes} B"


def rate_text(bits_per_s: float) -> str:
    """Decimal units: "400 Mbit/s"."""
    for scale, unit in ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s")):
        if bits_per_s >= scale:
            return f"{bits_per_s / scale:.3g} {unit}"
    return f"{bits_per_s:.3g} bit/s"


def _three_digits(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"

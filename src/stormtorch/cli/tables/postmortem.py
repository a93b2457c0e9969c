"""Tables of `stormtorch postmortem`: the collectives of each rank around the first difference."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stormtorch.cli.terminal.screen import new_table
from stormtorch.telemetry.text import size_text, time_text

if TYPE_CHECKING:
    from stormtorch.telemetry.postmortem import GroupFailure, Operation

# Collectives before and after the one in which ranks differ.
_BEFORE, _AFTER = 2, 1
_MOST_RANKS = 32


def show_failures(failures: "Sequence[GroupFailure]", console: Console) -> None:
    """Prints for each group the result, what its ranks did around that point, and their errors."""
    for failure in failures:
        console.print(failure.sentence, style="bold", markup=False, highlight=False)
        console.print()
        console.print(operations_table(failure))
        for flight in failure.flights[:_MOST_RANKS]:
            error = flight.error.removeprefix(f"rank {flight.rank}: ")
            console.print(f"rank {flight.rank}: {error}", style="dim", markup=False, highlight=False)
        console.print()


def operations_table(failure: "GroupFailure") -> Table:
    """What each rank did around the collective in which ranks differ. Ranks that did the same share a row."""
    table = new_table(
        f"group {escape(failure.group)}", "Times count from the start of the first of these operations.", keys=2
    )
    table.add_column("collective", justify="right")
    table.add_column("ranks")
    for heading in ("operation", "dtype", "shapes", "bytes", "began", "state"):
        table.add_column(heading, no_wrap=heading != "shapes")
    middle = failure.number or 1
    shown = range(max(middle - _BEFORE, 1), middle + _AFTER + 1)
    began = min(
        (each.started for flight in failure.flights for number, each in flight.collectives.items() if number in shown),
        default=0.0,
    )
    for number in shown:
        rows: dict[tuple[str, str, str, int, str], list[tuple[int, Operation]]] = {}
        for flight in failure.flights:
            done = flight.collectives.get(number)
            if done is not None:
                key = (done.name, done.dtype, done.shapes, done.size_bytes, done.state)
                rows.setdefault(key, []).append((flight.rank, done))
        for same in rows.values():
            first = same[0][1]
            ranks = [rank for rank, _ in same]
            table.add_row(
                f"{number}",
                ", ".join(map(str, ranks[:_MOST_RANKS])) + (" ..." if len(ranks) > _MOST_RANKS else ""),
                escape(first.name),
                first.dtype,
                escape(first.shapes),
                size_text(first.size_bytes),
                time_text(min(each.started for _, each in same) - began),
                first.state,
                style="bold" if number == failure.number and set(ranks) & set(failure.culprits) else None,
            )
        behind = [flight.rank for flight in failure.flights if number > flight.last]
        if behind and rows:
            table.add_row(f"{number}", ", ".join(map(str, behind[:_MOST_RANKS])), "not begun", style="bold")
    for rank in failure.silent:
        table.add_row("-", f"{rank}", "no record", style="bold")
    return table

"""Tables of `stormtorch chaos`: recoveries by kind of fault, invariants, and the verdict."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stormtorch.cli.terminal.screen import new_table
from stormtorch.telemetry.statistics import median
from stormtorch.telemetry.text import condition_text, loss_text, time_text

if TYPE_CHECKING:
    from stormtorch_lab.studies.chaos.report import ChaosReport

# Most rows of the timeline: about two screens.
_MOST_ROWS = 40
# Most violations printed per invariant; the JSON has more.
_MOST_SHOWN = 5


def show_chaos(report: "ChaosReport", console: Console, *, kept: Path | None) -> None:
    """Prints the tables and the verdict.

    Args:
        report: Results of the run.
        console: Console to print to.
        kept: Folder of the logs, if they were kept.
    """
    console.print(timeline_table(report))
    console.print(recovery_table(report))
    console.print(invariant_table(report))
    for check in report.checks:
        for problem in check.problems[:_MOST_SHOWN]:
            console.print(f"{escape(check.name)}: {escape(problem)}", style="red", highlight=False, soft_wrap=True)
    if kept is not None:
        console.print(f"logs: {escape(str(kept))}", highlight=False, soft_wrap=True)
    style = "bold green" if report.passed else "bold red"
    console.print(escape(report.verdict), style=style, highlight=False, soft_wrap=True)


def recovery_table(report: "ChaosReport") -> Table:
    """One row per kind of fault."""
    conditions = report.conditions
    title = (
        f"{len(report.recoveries)} faults on {report.settings.hosts} hosts, "
        f"{condition_text(conditions['requested'])}, seed {report.settings.seed}"
    )
    caption = (
        "Pause: longest time without a step on any host; after an outage, counted from its end. Return: from the end "
        f"of the fault until the affected hosts made steps again. Packets lost, storms included: "
        f"{loss_text(conditions['measured']['loss'])} measured."
    )
    table = new_table(title, caption)
    table.add_column("fault", no_wrap=True)
    for heading in ("count", "pause\nmedian", "pause\nworst", "return\nmedian", "return\nworst"):
        table.add_column(heading, justify="right", no_wrap=True)
    for kind in report.kinds:
        cells = [
            _time(value)
            for values in (kind.pauses_s, kind.returns_s)
            for value in ((median(values), max(values)) if values else (None, None))
        ]
        if kind.stopped:
            cells[1] = "never"
        table.add_row(kind.kind, f"{kind.count}", *cells)
    return table


def timeline_table(report: "ChaosReport") -> Table:
    """One row per fault in order of time; if there are too many, those with the longest pauses."""
    rows = report.recoveries
    title = "timeline"
    if len(rows) > _MOST_ROWS:
        longest = sorted(rows, key=lambda row: math.inf if row.pause_s is None else row.pause_s)[-_MOST_ROWS:]
        rows = sorted(longest, key=lambda row: row.struck.began_s)
        title = f"timeline, the {_MOST_ROWS} faults with the longest pauses"
    table = new_table(title)
    table.add_column("at", justify="right", no_wrap=True)
    table.add_column("fault", no_wrap=True)
    for heading in ("lasted", "pause", "return"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        struck = row.struck
        table.add_row(
            f"{struck.began_s - report.start_s:.1f} s",
            escape(struck.fault.description),
            f"{struck.ended_s - struck.began_s:.1f} s",
            "never" if row.pause_s is None else _time(row.pause_s),
            _time(row.return_s),
        )
    return table


def invariant_table(report: "ChaosReport") -> Table:
    """One row per invariant."""
    views = "1 view" if report.views == 1 else f"{report.views} views"
    caption = (
        f"{report.steps} steps in {views}; exact parameters compared at {report.compared} steps, {report.refused} "
        f"reads refused with an error."
    )
    if report.val_loss is not None:
        caption += f" Validation loss {report.val_loss:.4f}"
        caption += f", without faults {report.undisturbed:.4f}." if report.undisturbed is not None else "."
    table = new_table("invariants under faults", caption)
    table.add_column("invariant")
    table.add_column("holds", no_wrap=True)
    for check in report.checks:
        text = "yes" if check.holds else f"NO: {len(check.problems)}"
        table.add_row(escape(check.name), text, style=None if check.holds else "bold red")
    return table


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else time_text(seconds)

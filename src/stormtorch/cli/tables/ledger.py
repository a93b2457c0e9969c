"""Tables of `stormtorch ledger`: ranks, worst links and events."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stormtorch.cli.terminal.screen import new_table
from stormtorch.telemetry.histories import all_links, one_sentence
from stormtorch.telemetry.text import loss_text, share_text, size_text, time_text

if TYPE_CHECKING:
    from stormtorch.telemetry.histories import RankHistory

_SHOWN_LINKS = 8
_SHOWN_EVENTS = 10


def show_histories(histories: "Sequence[RankHistory]", console: Console) -> None:
    """Prints the summary, a line for each rank, the worst links and the last events."""
    console.print(one_sentence(histories), style="bold", markup=False, highlight=False)
    console.print()
    console.print(ranks_table(histories))
    links = links_table(histories)
    if links.row_count:
        console.print()
        console.print(links)
    events = [f"{each.name}: {event}" for each in histories for event in each.events]
    if events:
        console.print(f"\nevents: {len(events)}" + (f", the last {_SHOWN_EVENTS}:" * (len(events) > _SHOWN_EVENTS)))
        for event in events[-_SHOWN_EVENTS:]:
            console.print(f"  {event}", markup=False, highlight=False)


def ranks_table(histories: "Sequence[RankHistory]") -> Table:
    """One row per rank; times are those of one step."""
    unknown = any(history.latest("pair_drift") is None for history in histories)
    note = "-: drift was not measured." if unknown else None
    table = new_table("means of a step", note)
    table.add_column("rank", min_width=7, max_width=24, overflow="fold")
    # Most trainings have only one view, and 80 columns are few.
    views = any(history.total("view_wait_s") for history in histories)
    headings = ["steps", "time", "waits:\ngradients", "para-\nmeters", *["views"] * views]
    for heading in (*headings, "sent", "arrived", "drift", "bound"):
        table.add_column(heading, justify="right", no_wrap=True)
    for history in histories:
        steps = max(history.steps, 1)
        drift, bound = history.latest("pair_drift"), history.latest("pair_bound")
        table.add_row(
            escape(history.name),
            f"{history.steps}",
            "-" if history.seconds is None else time_text(history.seconds / steps),
            time_text(history.total("gradient_wait_s") / steps),
            time_text(history.total("broadcast_wait_s") / steps),
            *[time_text(history.total("view_wait_s") / steps)] * views,
            size_text(round(history.total("bytes_sent") / steps)),
            share_text(history.arrived),
            "-" if drift is None else f"{drift:.2g}",
            "-" if bound is None else f"{bound:.2g}",
        )
    return table


def links_table(histories: "Sequence[RankHistory]") -> Table:
    """Table of the links that lost most."""
    links = all_links(histories)
    more = len(links) - _SHOWN_LINKS
    table = new_table("links, the worst first", f"and {more} more" if more > 0 else None)
    table.add_column("from")
    table.add_column("to")
    for heading in ("chunks arrived", "loses now", "round trip"):
        table.add_column(heading, justify="right", no_wrap=True)
    for link in links[:_SHOWN_LINKS]:
        table.add_row(
            link.source,
            escape(link.target),
            share_text(link.arrived),
            "-" if link.loss is None else loss_text(link.loss),
            "-" if not link.rtt_s else time_text(link.rtt_s),
        )
    return table

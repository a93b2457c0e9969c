"""Tables of `stormtorch doctor`: the verdict first, then the links, then settings to paste."""

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stormtorch.cli.terminal.screen import hanging_indent, new_table
from stormtorch.doctor.advice import Advice, PredictedCost
from stormtorch.doctor.diagnosis import Diagnosis, Level
from stormtorch.doctor.examination import DirectedLink, Examination
from stormtorch.doctor.verdict import LOSS_PROBLEM
from stormtorch.telemetry.text import loss_text, rate_text, time_text

_STYLES = {Level.OK: "green", Level.NOTE: "yellow", Level.PROBLEM: "bold red"}
_MOST_IN_MATRIX = 7  # more do not fit into 80 columns
_MOST_LINKS = 12
_ODD: dict[str, Callable[[DirectedLink], int]] = {
    "reordered": lambda link: link.reordered,
    "duplicate": lambda link: link.duplicates,
    "overflow": lambda link: link.overflowed,
}
"""Columns that appear only if a count is not 0."""


def show_machine(diagnoses: Sequence[Diagnosis], console: Console) -> None:
    """Prints a line for each diagnosis of this machine."""
    width = max(len(each.subject) for each in diagnoses)
    for each in diagnoses:
        hanging_indent(
            (f"{each.level.value:<14}", _STYLES[each.level]), f"{each.subject:<{width}}  {each.text}", console
        )
        if each.remedy:
            console.print(Text(f"{'':<14}-> {each.remedy}"), soft_wrap=True)
    problems = sum(each.level is Level.PROBLEM for each in diagnoses)
    notes = sum(each.level is Level.NOTE for each in diagnoses)
    if problems:
        verdict = f"{_count(problems, 'problem')}, {_count(notes, 'thing')} worth knowing."
    elif notes:
        verdict = f"This machine is fine; {_count(notes, 'thing')} worth knowing."
    else:
        verdict = "This machine is fine."
    console.print(Text(f"\n{verdict}", style="bold"), soft_wrap=True)


def show_network(
    found: Examination,
    diagnoses: Sequence[Diagnosis],
    advice: Advice,
    cost: PredictedCost | None,
    console: Console,
    *,
    captured: Path | None = None,
) -> None:
    """Prints the verdict with remedies, a table of the links, and settings to paste."""
    _show_verdict(found, diagnoses, console)
    _show_links(found, diagnoses, console)
    _show_advice(advice, console)
    if cost is not None:
        _show_cost(cost, console)
    if captured is not None:
        world = found.world
        console.print(
            Text(
                f"\nWrote {captured}. Replay it:\n"
                f"  stormtorch lab run --hosts {world} --per-link {captured} -- python train.py\n"
                f"  stormtorch simulate --workers {world} --per-link {captured}"
            ),
            soft_wrap=True,
        )


def _show_verdict(found: Examination, diagnoses: Sequence[Diagnosis], console: Console) -> None:
    problems = [each for each in diagnoses if each.level is Level.PROBLEM]
    if problems:
        console.print(Text(f"{_count(len(problems), 'problem')}", style=_STYLES[Level.PROBLEM]))
    else:
        worst = max((link.loss for link in found.links.values()), default=0.0)
        text = (
            f"All {len(found.links)} links among {len(found.ranks)} ranks are fine: the worst loses {loss_text(worst)}."
        )
        console.print(Text(text, style="bold green"), soft_wrap=True)
    number = 0
    for each in diagnoses:
        if each.level is Level.PROBLEM:
            number += 1
            head = f"{number}. "
        else:
            head = f"{each.level.value}: "
        hanging_indent((head, _STYLES[each.level]), (each.text, "bold"), console)
        if each.remedy:
            console.print(Text(f"   -> {each.remedy}"), soft_wrap=True)


def _show_links(found: Examination, diagnoses: Sequence[Diagnosis], console: Console) -> None:
    if len(found.ranks) <= _MOST_IN_MATRIX:
        console.print(_matrix(found), highlight=False)
    blamed = {rank for each in diagnoses if each.level is Level.PROBLEM for rank in each.ranks}
    named = {frozenset(each.ranks) for each in diagnoses if each.level is Level.PROBLEM and len(each.ranks) == 2}

    def badness(link: DirectedLink) -> tuple[bool, bool, float, float]:
        is_named = frozenset((link.source, link.target)) in named
        return link.received, not is_named, -link.loss, -(link.round_trip_s or 0.0)

    links = sorted(found.links.values(), key=badness)
    left_out = len(links) - _MOST_LINKS
    caption = f"{left_out} more are not shown; --json lists all." if left_out > 0 else None
    table = new_table("\nThe worst links" if left_out > 0 else "\nThe links, the worst first", caption)
    table.add_column("from > to")  # names of hosts may be long
    odd = [name for name, count in _ODD.items() if any(count(link) for link in found.links.values())]
    for name in ("loss", "burst", "round trip", "99 %", "jitter", "rate", "MTU", *odd):
        table.add_column(name, justify="right", no_wrap=True)
    for link in links[:_MOST_LINKS]:
        style = None if blamed & {link.source, link.target} else "dim"
        name = f"{found.short_name(link.source)} > {found.short_name(link.target)}"
        table.add_row(name, *_cells(link, odd), style=style)
    console.print(table, highlight=False)


def _matrix(found: Examination) -> Table:
    """Loss, round trip and rate of every link: senders in the rows, receivers in the columns."""
    table = new_table(f"\n{len(found.links)} links in {found.seconds:.0f} s: loss, round trip, rate")
    table.add_column("from \\ to", no_wrap=True)
    ranks = sorted(found.ranks)
    for rank in ranks:
        table.add_column(found.short_name(rank), justify="right", no_wrap=True)
    for source in ranks:
        cells = [found.links.get((source, target)) for target in ranks]
        table.add_row(found.short_name(source), *("-" if link is None else _cell(link) for link in cells))
        table.add_section()
    return table


def _cell(link: DirectedLink) -> Text:
    if not link.received:
        return Text("no UDP" if link.tcp else "nothing", style=_STYLES[Level.PROBLEM])
    style = _STYLES[Level.PROBLEM] if link.loss >= LOSS_PROBLEM else ""
    text = Text(loss_text(link.loss), style=style)
    if link.round_trip_s is not None:
        text.append(f"\n{time_text(link.round_trip_s)}", style="")
    if link.rate_bits:
        text.append("\n" + _rate(link), style="")
    return text


def _cells(link: DirectedLink, odd: Sequence[str]) -> list[str]:
    if not link.received:
        return ["no UDP" if link.tcp else "nothing", *[""] * (6 + len(odd))]
    trips = [link.round_trip_s, link.slow_round_trip_s, link.jitter_s]
    cells = [
        loss_text(link.loss),
        f"{link.burst:.1f}" if link.loss else "",
        *("" if each is None else time_text(each) for each in trips),
        _rate(link) if link.rate_bits else "",
        str(link.path_bytes or ""),
    ]
    return cells + [str(_ODD[name](link) or "") for name in odd]


def _rate(link: DirectedLink) -> str:
    # If the sender was the bottleneck, the link carries at least this rate.
    return ("" if link.limited else ">") + rate_text(link.bottleneck_bits).replace("bit/s", "b/s")


def _show_advice(advice: Advice, console: Console) -> None:
    options = advice.options()
    policy = advice.policy()
    names = ["BoundedDrift"] + (["Options"] if options else []) + (["EXACT"] if advice.exact else [])
    lines = ["import torch"] if advice.wire else []
    lines += ["import torch.distributed as dist", f"from stormtorch import {', '.join(sorted(names))}, prepare"]
    lines.append(f'dist.init_process_group("storm"{f", pg_options={options}" if options else ""})')
    lines.append(f"model, optimizer = prepare(model, optimizer, policy={policy})")
    why = "almost no loss, so retransmission is cheap" if advice.exact else "lossy, so no step waits for lost data"
    console.print(Text(f"\nSettings that suit this network ({why}):", style="bold"), soft_wrap=True)
    console.print(Text("\n".join(f"  {line}" for line in lines)), soft_wrap=True)


def _show_cost(cost: PredictedCost, console: Console) -> None:
    console.print(Text(f"\n{cost.parameters / 1e6:g} M parameters on {cost.ranks} ranks: a prediction", style="bold"))
    at_least = "" if cost.rate_is_limit else "at least "
    lines = [
        f"The slowest link carries {at_least}{rate_text(cost.rate_bits)}; the mean loss is {loss_text(cost.loss)}.",
        f"Ideal reliable ring all-reduce: {time_text(cost.reliable_s)} of communication a step; gloo needs more.",
        f"BoundedDrift: {time_text(cost.drift_s)} a step, and {100 * (cost.more_steps - 1):.1f} % more steps for "
        "the same accuracy if gradient noise limits the training, fewer otherwise.",
        f"BoundedDrift(wire=torch.bfloat16): {time_text(cost.drift_s / 2)} a step.",
        "Computation is not included; it overlaps with communication. `stormtorch theory` explains the formulas.",
    ]
    for line in lines:
        hanging_indent("  ", line, console)


def wide_console() -> Console:
    """Console as wide as the terminal, or at least 120 columns if the output goes elsewhere."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, 120))


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"

"""Tables of benchmarks that train: steps and convergence against gloo."""

from typing import TYPE_CHECKING, Any

from rich.table import Table

from stormtorch.cli.terminal.screen import new_table
from stormtorch.telemetry.text import (
    condition_text,
    network_text,
    oversubscription_text,
    ratio_text,
    share_text,
    signed_time_text,
    size_text,
    time_text,
)
from stormtorch_lab.cli.tables.captions import loss_sentence, round_text, troubles_text

if TYPE_CHECKING:
    from stormtorch_lab.bench.convergence import ConvergenceReport
    from stormtorch_lab.bench.ddp import DdpReport


def ddp_table(report: "DdpReport") -> Table:
    """One row per backend."""
    conditions = report.conditions
    in_lab = "requested" in conditions
    each = conditions.get("ranks_per_host", 1)
    ranks = f"{conditions['ranks']} ranks" + (f", {each} on each host" if each > 1 else "")
    title = (
        f"a training step of {conditions['params'] / 1e6:.3g} M parameters, {ranks}, "
        f"{network_text(conditions['requested']) if in_lab else 'loopback'}"
    )
    table = new_table(title, _ddp_caption(conditions))
    table.add_column("backend", no_wrap=True)
    # A terminal is too narrow for all columns: the ideal is shown where the network has a rate, else the worst
    # round.
    lined = conditions["line_s"] is not None
    headings = ["median", "rounds", "adds", "x\ngloo", "moved", "adds x\nideal", "arrived", "CPU\ns/GB"]
    if not lined:
        headings = ["median", "worst", "rounds", "adds", "x\ngloo", "speed-\nup", "arrived", "CPU\ns/GB"]
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for result in report.results:
        above = ">" if result.median_is_bound else ""
        # The ratio of two lower bounds is meaningless.
        known = not (result.gloo_gave_up and result.median_is_bound)
        below = "<" if result.gloo_gave_up else ""
        over_gloo = (above or below) + ratio_text(result.over_gloo) if result.over_gloo and known else "-"
        adds = above + signed_time_text(result.adds_s)
        median_text = above + time_text(result.median_s)
        arrived = "-" if result.gave_up and result.rounds == 1 else share_text(result.arrived)
        cpu = f"{result.cpu_s_per_gb:.2f}"
        if result.adds_over_ideal is not None:
            moved, over_ideal = size_text(round(result.moved_bytes)), above + ratio_text(result.adds_over_ideal)
            cells = [median_text, f"{result.rounds}", adds, over_gloo, moved, over_ideal, arrived, cpu]
        else:
            worst = (">" if result.gave_up else "") + time_text(result.worst_s)
            speedup = _opposite(above or below) + ratio_text(result.speedup) if result.speedup and known else "-"
            cells = [median_text, worst, f"{result.rounds}", adds, over_gloo, speedup, arrived, cpu]
        table.add_row(result.backend, *cells)
    table.add_row("no_sync", time_text(conditions["no_sync_s"]), style="dim")
    if lined:
        table.add_row("line", time_text(conditions["line_s"]), style="dim")
    return table


def _ddp_caption(conditions: dict[str, Any]) -> str:
    in_lab = "requested" in conditions
    text = f"{loss_sentence(conditions['requested'], conditions['measured'])} " if in_lab else ""
    text += (
        round_text(conditions) if in_lab else f"{conditions['iters']} interleaved rounds; times are the slowest rank's"
    )
    if conditions["steps"] > 1:
        text += f", per step, {conditions['steps']} steps per round and backend"
    text += "; adds: time that communication adds to a step without any (no_sync)"
    if conditions["line_s"] is None:
        text += "; speed-up: gloo's median divided by this one."
    else:
        text += ". Moved: data that each rank must send, and receive as much; ideal: its time at the rate of the link."
    text += " CPU: processor time of all ranks beyond that of no_sync, per GB of gradients."
    if not in_lab:
        text += oversubscription_text(conditions["ranks"], conditions["machine"]["cores_usable"])
    return text + troubles_text(conditions)


def _opposite(bound: str) -> str:
    return bound.translate(str.maketrans("<>", "><"))


def convergence_table(report: "ConvergenceReport") -> Table:
    """One row per backend."""
    conditions = report.conditions
    where = condition_text(conditions["requested"]) if "requested" in conditions else "loopback"
    params = report.curves[0].params / 1e6
    title = f"a language model of {params:.3g} M parameters learns, {conditions['ranks']} ranks, {where}"
    caption = (
        f"{conditions['seconds']:g} s of training each, evaluations not counted; one backend after the other, with the "
        "same weights and batches."
    )
    if report.target is not None:
        given = conditions.get("target") is not None
        caption += f" Reached: the seconds until a loss of {report.target:.3f}"
        caption += "" if given else ", which all backends reached"
        caption += "; speed-up: seconds of gloo divided by these." if report.peer else "."
    table = new_table(title, caption)
    table.add_column("backend", no_wrap=True)
    for heading in ("steps", "a step", "last\nloss", "reached", "speed-\nup", "arrived"):
        table.add_column(heading, justify="right", no_wrap=True)
    for curve in report.curves:
        reached_s, speedup = report.reached_s(curve), report.speedup(curve)
        table.add_row(
            curve.backend,
            f"{curve.steps[-1]}" + (" (aborted)" if curve.gave_up else ""),
            time_text(curve.step_s) if curve.step_s else "-",
            f"{curve.losses[-1]:.3f}",
            time_text(reached_s) if reached_s is not None else "-",
            ratio_text(speedup) if speedup else "-",
            share_text(curve.arrived),
        )
    return table

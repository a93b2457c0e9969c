"""Tables of benchmarks beside gloo."""

from typing import TYPE_CHECKING, Any

from rich.table import Table

from stormtorch.bench.results import AllReduceReport, AllReduceResult
from stormtorch.jobs.counters import median
from stormtorch.results.text import (
    crowding_text,
    loss_text,
    new_table,
    rate_text,
    ratio_text,
    share_text,
    signed_time_text,
    size_text,
    time_text,
)

if TYPE_CHECKING:
    from stormtorch.bench.convergence import ConvergenceReport
    from stormtorch.bench.ddp import DdpReport
    from stormtorch.bench.sweep import SweepReport


def allreduce_table(report: AllReduceReport) -> Table:
    """One row per backend and size."""
    conditions = report.conditions
    in_lab = "requested" in conditions
    where = network_text(conditions["requested"]) if in_lab else "loopback"
    title = f"all-reduce of {conditions['dtype']} over {conditions['hosts']} ranks, {where}"
    table = new_table(title, _lab_caption(conditions) if in_lab else _loopback_caption(conditions))
    table.add_column("size", justify="right")
    table.add_column("backend", no_wrap=True)
    # Of the few rounds that a slow network allows, the 99th percentile is the worst one.
    spread = "rounds" if in_lab else "p99"
    for heading in ("median", spread, "worst", "x\ngloo", "x\nideal", "arrived", "CPU\ns/GB"):
        table.add_column(heading, justify="right", no_wrap=True)
    for mb in conditions["mb"]:
        rows = [result for result in report.results if result.mb == mb]
        gloo_s = next((result.median_s for result in rows if result.backend.startswith("gloo")), None)
        for result in rows:
            above = ">" if result.median_is_bound else ""
            table.add_row(
                size_text(round(mb * 1e6)) if result is rows[0] else "",
                result.backend,
                above + time_text(result.median_s),
                f"{result.rounds}" if in_lab else time_text(result.p99_s),
                (">" if result.gave_up else "") + time_text(result.worst_s),
                above + ratio_text(result.median_s / gloo_s) if gloo_s else "-",
                above + ratio_text(result.over_ideal) if result.over_ideal else "-",
                "-" if result.gave_up and result.rounds == 1 else share_text(result.arrived),
                f"{result.cpu_s_per_gb:.2f}",
            )
        if rows and rows[0].ideal_s is not None:
            table.add_row("", "ideal", time_text(rows[0].ideal_s), style="dim")
        table.add_section()
    return table


def ddp_table(report: "DdpReport") -> Table:
    """One row per backend."""
    conditions = report.conditions
    in_lab = "requested" in conditions
    title = (
        f"a training step of {conditions['params'] / 1e6:.3g} M parameters, {conditions['hosts']} ranks, "
        f"{network_text(conditions['requested']) if in_lab else 'loopback'}"
    )
    table = new_table(title, _ddp_caption(conditions))
    table.add_column("backend", no_wrap=True)
    # What the network allows matters where it has a rate, the worst round and the processor where it has none; a
    # terminal has no room for all.
    lined = conditions["line_s"] is not None
    headings = ["median", "rounds", "adds", "x\ngloo", "moved", "adds x\nideal", "arrived"]
    if not lined:
        headings = ["median", "worst", "rounds", "adds", "x\ngloo", "speed-\nup", "arrived", "CPU\ns"]
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for result in report.results:
        above = ">" if result.median_is_bound else ""
        # Of two medians that are only known to be larger, the ratio says nothing.
        known = not (result.gloo_gave_up and result.median_is_bound)
        below = "<" if result.gloo_gave_up else ""
        over_gloo = (above or below) + ratio_text(result.over_gloo) if result.over_gloo and known else "-"
        adds = above + signed_time_text(result.adds_s)
        median_text = above + time_text(result.median_s)
        arrived = "-" if result.gave_up and result.rounds == 1 else share_text(result.arrived)
        if result.adds_over_ideal is not None:
            moved, over_ideal = size_text(round(result.moved_bytes)), above + ratio_text(result.adds_over_ideal)
            cells = [median_text, f"{result.rounds}", adds, over_gloo, moved, over_ideal, arrived]
        else:
            worst = (">" if result.gave_up else "") + time_text(result.worst_s)
            speedup = _opposite(above or below) + ratio_text(result.speedup) if result.speedup and known else "-"
            cells = [median_text, worst, f"{result.rounds}", adds, over_gloo, speedup, arrived, f"{result.cpu_s:.2f}"]
        table.add_row(result.backend, *cells)
    table.add_row("no_sync", time_text(conditions["no_sync_s"]), style="dim")
    if lined:
        table.add_row("line", time_text(conditions["line_s"]), style="dim")
    return table


def _ddp_caption(conditions: dict[str, Any]) -> str:
    in_lab = "requested" in conditions
    text = f"{_loss_sentence(conditions['requested'], conditions['measured'])} " if in_lab else ""
    text += (
        _round_text(conditions) if in_lab else f"{conditions['iters']} interleaved rounds; times are the slowest rank's"
    )
    if conditions["steps"] > 1:
        text += f", per step of turns of {conditions['steps']}"
    text += "; adds: what communication adds to a step without any, no_sync"
    if conditions["line_s"] is None:
        text += "; speed-up: gloo's median over this one."
    else:
        text += ". Moved: what each rank must send, and receive as much; ideal: at the rate of its line."
    if not in_lab:
        text += crowding_text(conditions["hosts"], conditions["machine"]["cores_usable"])
    return text + _drops_text(conditions)


def _opposite(bound: str) -> str:
    return bound.translate(str.maketrans("<>", "><"))


def network_text(requested: dict[str, Any]) -> str:
    """The conditions of a lab without its loss: "400 Mbit/s, round trip 40 ms"."""
    rate = requested["rate_bits_per_s"]
    text = "lab without limits" if rate is None else rate_text(rate)
    if requested["round_trip_s"]:
        text += f", round trip {1e3 * requested['round_trip_s']:.3g} ms"
    return text


def condition_text(requested: dict[str, Any]) -> str:
    """The same with the loss: "400 Mbit/s, round trip 40 ms, loss 10 %"."""
    return f"{network_text(requested)}, loss {loss_of(requested) * 100:g} %"


def loss_of(requested: dict[str, Any]) -> float:
    """The rate of a loss that is one number, in bursts or not."""
    loss = requested["loss"]
    return float(loss["p"] if isinstance(loss, dict) else loss)


def sweep_table(report: "SweepReport") -> Table:
    """One row per condition, one column per backend."""
    conditions = report.conditions
    caption = (
        f"x ideal: median time of all-reduce over the ideal, which is what each of {conditions['hosts']} ranks must "
        "send at the rate of its line (1 is perfect). "
        f"Interleaved rounds, {conditions['iters']} asked for: where patience ended with fewer, their number stands in "
        f"brackets; > where a call did not end within {conditions['patience_s']:g} s."
    )
    table = new_table("all-reduce under real loss, x ideal", caption)
    for heading in ("rate", "round\ntrip", "loss\nasked", "\nseen", "size"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name in conditions["backends"]:
        table.add_column(name.replace("-", "\n"), justify="right", no_wrap=True)
    last = ""
    for point in report.points:
        network = network_text(point.requested)
        if last and network != last:
            table.add_section()
        last = network
        cells = [
            rate_text(point.requested["rate_bits_per_s"]),
            f"{1e3 * point.requested['round_trip_s']:.3g} ms",
            f"{loss_of(point.requested) * 100:g} %",
            "" if point.measured is None else loss_text(point.measured["loss"]),
            size_text(round(point.mb * 1e6)),
        ]
        by_name = {result.backend: result for result in point.results}
        for name in conditions["backends"]:
            cells.append(_cell(by_name[name], conditions["iters"]) if name in by_name else "failed")
        table.add_row(*cells)
    return table


def _cell(result: AllReduceResult, iters: int) -> str:
    assert result.over_ideal is not None
    text = ratio_text(result.over_ideal)
    if result.median_is_bound:
        return ">" + text
    return text if result.rounds == iters else f"{text} ({result.rounds})"


def convergence_table(report: "ConvergenceReport") -> Table:
    """One row per backend."""
    conditions = report.conditions
    where = condition_text(conditions["requested"]) if "requested" in conditions else "loopback"
    params = report.curves[0].params / 1e6
    title = f"a language model of {params:.3g} M parameters learns, {conditions['hosts']} ranks, {where}"
    caption = (
        f"{conditions['seconds']:g} s of training each, evaluations not counted; one after the other, with the same "
        "weights and batches."
    )
    if report.target is not None:
        caption += f" Reached: the seconds until a loss of {report.target:.3f}, which all came to"
        caption += "; speed-up: those of gloo over these." if report.peer else "."
    table = new_table(title, caption)
    table.add_column("backend", no_wrap=True)
    for heading in ("steps", "a step", "last\nloss", "reached", "speed-\nup", "arrived"):
        table.add_column(heading, justify="right", no_wrap=True)
    for curve in report.curves:
        reached_s, speedup = report.reached_s(curve), report.speedup(curve)
        table.add_row(
            curve.backend,
            f"{curve.steps[-1]}" + (" (given up)" if curve.gave_up else ""),
            time_text(curve.step_s) if curve.step_s else "-",
            f"{curve.losses[-1]:.3f}",
            time_text(reached_s) if reached_s is not None else "-",
            ratio_text(speedup) if speedup else "-",
            share_text(curve.arrived),
        )
    return table


def _loopback_caption(conditions: dict[str, Any]) -> str:
    text = (
        f"{conditions['iters']} interleaved rounds; times are the slowest rank's; x: ratio of medians, below 1 is "
        "faster. Ideal: the time to copy as many bytes once in and once out, on all ranks at once."
    )
    text += crowding_text(conditions["hosts"], conditions["machine"]["cores_usable"])
    if conditions["faults_requested"]:
        text += (
            f" Injected loss: {loss_text(conditions['faults_requested'])} asked, "
            f"{loss_text(conditions['loss_measured'])} measured, for the storm backends only. "
            "gloo ran without loss: it cannot be injected below TCP without root."
        )
    return text + _drops_text(conditions)


def _lab_caption(conditions: dict[str, Any]) -> str:
    text = (
        f"{_loss_sentence(conditions['requested'], conditions['measured'])} {_round_text(conditions)}; "
        "x: ratio of medians, below 1 is faster. "
    )
    if conditions["requested"]["rate_bits_per_s"] is not None:
        text += "Ideal: what each rank must send, at the rate of its line."
    return text.rstrip() + _drops_text(conditions)


def _round_text(conditions: dict[str, Any]) -> str:
    return (
        f"Interleaved rounds, {conditions['iters']} asked for; times are the slowest rank's, > where a call did not "
        f"end within {conditions['patience_s']:g} s"
    )


def _loss_sentence(requested: dict[str, Any], measured: dict[str, Any]) -> str:
    loss = requested["loss"]
    text = "Loss of packets, the same for all backends"
    if isinstance(loss, float):
        text += f": {loss_text(loss)} asked, "
    elif "burst" in loss:
        text += f": {loss_text(loss['p'])} in bursts of {loss['burst']:g} asked, "
    else:
        text += " by a model: "
    text += f"{loss_text(measured['loss'])} measured; {loss_text(measured['overflow'])} more found a queue full."
    if measured["round_trips_s"]:
        text += f" Round trip measured: {time_text(median(measured['round_trips_s']))}."
    return text


def _drops_text(conditions: dict[str, Any]) -> str:
    drops = conditions["kernel_drops"]
    return f" The kernel dropped {drops} datagrams for want of buffer." if drops else ""

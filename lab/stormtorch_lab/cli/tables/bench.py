"""Tables of benchmarks of single exchanges: all-reduce against gloo, sweeps, latency, manners."""

from typing import TYPE_CHECKING, Any

from rich.table import Table

from stormtorch.cli.terminal.screen import new_table
from stormtorch.telemetry.text import (
    bursts_of,
    loss_of,
    loss_text,
    network_text,
    oversubscription_text,
    rate_text,
    ratio_text,
    share_text,
    size_text,
    time_text,
)
from stormtorch_lab.bench.results import AllReduceReport, AllReduceResult
from stormtorch_lab.cli.tables.captions import loss_sentence, much_withheld, round_text, troubles_text

if TYPE_CHECKING:
    from stormtorch_lab.bench.latency import LatencyReport
    from stormtorch_lab.bench.sharing.fairness import FairnessReport
    from stormtorch_lab.bench.sweep import SweepReport


def allreduce_table(report: AllReduceReport) -> Table:
    """One row per backend and size."""
    conditions = report.conditions
    in_lab = "requested" in conditions
    where = network_text(conditions["requested"]) if in_lab else "loopback"
    each = conditions.get("ranks_per_host", 1)
    ranks = f"{conditions['ranks']} ranks" + (f", {each} on each host" if each > 1 else "")
    title = f"all-reduce of {conditions['dtype']} over {ranks}, {where}"
    table = new_table(title, _caption(conditions), keys=2)
    table.add_column("size", justify="right")
    table.add_column("backend", no_wrap=True)
    # A slow network allows few rounds, whose 99th percentile is the worst one. A cable has no rate to compare with: its
    # rate is the result.
    by_cable = in_lab and "cable_mtu" in conditions["requested"]
    further = "Gbit/s" if by_cable else "rounds" if in_lab else "p99"
    for heading in ("median", further, "worst", "x\ngloo", "x\nideal", "arrived", "CPU\ns/GB"):
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
                f"{result.gbit_per_s:.2f}" if by_cable else f"{result.rounds}" if in_lab else time_text(result.p99_s),
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


def _caption(conditions: dict[str, Any]) -> str:
    if "requested" not in conditions:
        return _loopback_caption(conditions)
    return _cable_caption(conditions) if "cable_mtu" in conditions["requested"] else _lab_caption(conditions)


_RATIOS = "x: ratio of medians, below 1 is faster. "
_COPIES = "Ideal: the time to copy as many bytes once in and once out, on all ranks at once. "
_CPU = "CPU: processor time of all ranks per GB of the tensor."


def _cable_caption(conditions: dict[str, Any]) -> str:
    text = f"{conditions['iters']} interleaved rounds; times are the slowest rank's; {_RATIOS}{_COPIES}"
    text += f"Gbit/s: what each rank sends, and receives as much, over the median. {_CPU}"
    return text + troubles_text(conditions)


def _loopback_caption(conditions: dict[str, Any]) -> str:
    text = f"{conditions['iters']} interleaved rounds; times are the slowest rank's; {_RATIOS}{_COPIES}{_CPU}"
    text += oversubscription_text(conditions["ranks"], conditions["machine"]["cores_usable"])
    if conditions["faults_requested"]:
        text += (
            f" Injected loss: {loss_text(conditions['faults_requested'])} requested, "
            f"{loss_text(conditions['loss_measured'])} measured, for the storm backends only. "
            "gloo ran without loss: it cannot be injected below TCP without root."
        )
    return text + troubles_text(conditions)


def _lab_caption(conditions: dict[str, Any]) -> str:
    text = f"{loss_sentence(conditions['requested'], conditions['measured'])} {round_text(conditions)}; {_RATIOS}"
    if conditions["requested"]["rate_bits_per_s"] is not None:
        text += "Ideal: the time to send each host's data at the rate of its link. "
    return text + _CPU + troubles_text(conditions)


def sweep_table(report: "SweepReport") -> Table:
    """One row per condition, one column per backend."""
    conditions = report.conditions
    caption = (
        f"x ideal: median time of all-reduce over the ideal, the time to send the data of each of "
        f"{conditions['ranks']} ranks at the rate of its link (1 is perfect). "
        f"Interleaved rounds, {conditions['iters']} requested; where the wait limit ended them early, their number is "
        f"in brackets; > where a call did not end within {conditions['patience_s']:g} s."
    )
    if any(much_withheld(point.processors_withheld) for point in report.points):
        caption += " *: the hypervisor withheld over 5 % of the processor time: times are unreliable."
    table = new_table("all-reduce under real loss, x ideal", caption, keys=3)
    for heading in ("rate", "round\ntrip", "loss\nasked", "\nseen", "bursts", "size"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name in conditions["backends"]:
        table.add_column(name.replace("-", "\n"), justify="right", no_wrap=True)
    last = ""
    for point in report.points:
        network = network_text(point.requested)
        if last and network != last:
            table.add_section()
        last = network
        mark = "* " if much_withheld(point.processors_withheld) else ""
        cells = [
            mark + rate_text(point.requested["rate_bits_per_s"]),
            f"{1e3 * point.requested['round_trip_s']:.3g} ms",
            f"{loss_of(point.requested) * 100:g} %",
            "" if point.measured is None else loss_text(point.measured["loss"]),
            bursts_of(point.requested),
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


def latency_table(report: "LatencyReport") -> Table:
    """One row per size and backend."""
    conditions = report.conditions
    empty = ", ".join(f"{kind} {time_text(seconds)}" for kind, seconds in report.empty_exchange_s.items())
    idle = ", ".join(f"{kind} {percent:.3f}" for kind, percent in report.idle_cpu_percent.items())
    table = new_table(
        f"latency of all-reduce over {conditions['ranks']} ranks, loopback",
        f"{conditions['iters']} interleaved rounds per size; times are the slowest rank's, from the end of a barrier; "
        "CPU is processor time of all ranks, per call and per GB of the tensor."
        + oversubscription_text(conditions["ranks"], conditions["machine"]["cores_usable"])
        + f" An empty exchange between two ranks, back to back, median: {empty}."
        + f" CPU of a connected idle process, in percent of a core: {idle}.",
        keys=2,
    )
    table.add_column("size", justify="right")
    table.add_column("backend", no_wrap=True)
    for heading in ("median", "p99", "x\ngloo", "CPU", "CPU\ns/GB"):
        table.add_column(heading, justify="right", no_wrap=True)
    for size in sorted({result.bytes for result in report.results}):
        rows = [result for result in report.results if result.bytes == size]
        gloo_s = next((result.median_s for result in rows if result.backend == "gloo"), None)
        for result in rows:
            table.add_row(
                size_text(size) if result is rows[0] else "",
                result.backend,
                time_text(result.median_s),
                time_text(result.p99_s),
                ratio_text(result.median_s / gloo_s) if gloo_s else "-",
                time_text(result.cpu_s),
                f"{result.cpu_s_per_gb:,.{0 if result.cpu_s_per_gb >= 100 else 2}f}",
            )
        table.add_section()
    return table


def fairness_table(report: "FairnessReport") -> Table:
    """One row per result."""
    table = new_table("congestion control on an unknown network, with no rate given")
    for heading in ("", "figure", "bound", ""):
        table.add_column(heading, justify="left" if not heading else "right")
    for finding in report.findings:
        units = {"step": "{:.0f}", "pause": "{:.2f} s", "alone": "{:.3f}"}
        figure, bound = (
            units[finding.name].format(x) if finding.name in units else f"{100 * x:.2f} %"
            for x in (finding.figure, finding.bound)
        )
        table.add_row(finding.what, figure, f"{'≤' if finding.at_most else '≥'} {bound}", "" if finding.good else "✗")
    return table
